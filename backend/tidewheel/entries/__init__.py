"""Entries of a model repository before a server sees them: checked, mended, and migrated from other backends."""
