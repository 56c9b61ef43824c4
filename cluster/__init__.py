"""Many replicas as one service: the Ray Serve application, the HTTP ingress and the command line."""
