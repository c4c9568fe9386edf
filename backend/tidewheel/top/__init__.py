"""A view of a running server: readiness, classes, tenants, cache, steps, errors, and the requests that run."""

from __future__ import annotations


class TopError(Exception):
    """Nothing to show. The message says what to do."""
