"""One replica: scheduler, paged KV cache, models and the engine that steps them. Knows nothing of Ray.

Importing this package imports nothing else, so that the control plane stays free of torch.
"""
