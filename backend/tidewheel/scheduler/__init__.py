"""Decisions of who runs in the next step; without torch and clock."""
