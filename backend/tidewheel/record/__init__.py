"""Recordings of scheduling decisions."""
