"""Engines of others, each in a process of its own, maybe of another Python environment: nothing here needs ours."""
