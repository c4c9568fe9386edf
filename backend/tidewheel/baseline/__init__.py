"""Baselines: Triton without an engine for language models."""
