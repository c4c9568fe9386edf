"""Blocks of the KV cache: which are free, who holds them, and what is worth keeping. Pure Python, no torch."""
