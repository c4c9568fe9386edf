"""Blocks of the KV cache; without torch."""
