"""Blocks of the KV cache: sharing, eviction, host tier and sessions. Pure Python, without torch."""
