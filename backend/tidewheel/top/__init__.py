"""View of a running server: readiness, classes, tenants, cache, steps, errors and running requests."""

from __future__ import annotations


class TopError(Exception):
    """No server to show; the message says what to do."""
