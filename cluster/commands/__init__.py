"""One module for each `pagoda` command."""
