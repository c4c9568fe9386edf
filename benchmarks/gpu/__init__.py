"""Measurements on a GPU: kernels, engine, latency, the whole path through Triton, and other engines beside it."""
