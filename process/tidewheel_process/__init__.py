"""Processes that are started and watched, and the folders that they hold."""
