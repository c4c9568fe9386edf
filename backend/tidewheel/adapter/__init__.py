"""Adapter between Triton's Python backend and the front end."""
