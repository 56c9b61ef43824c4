"""Pagoda: an LLM serving cluster with a tiered, cluster-wide paged KV cache."""

__version__ = "0.1.0"
