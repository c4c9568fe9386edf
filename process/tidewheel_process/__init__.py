"""Processes, and folders that they hold."""
