"""Who holds which KV block, and which worker a request goes to."""
