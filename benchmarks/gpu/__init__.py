"""Measurements on a GPU: kernels, engine, latency, Triton's share, and other engines."""
