"""Blocks of the KV cache: sharing, eviction, host tier and sessions. No torch."""
