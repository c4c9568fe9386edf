"""Processes and their folders."""
