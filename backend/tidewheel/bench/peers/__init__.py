"""Peer engines, each in its own process, maybe of another Python environment."""
