"""Model architectures and what is needed to load them."""
