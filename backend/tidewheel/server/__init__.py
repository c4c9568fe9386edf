"""Supervision of a tritonserver."""
