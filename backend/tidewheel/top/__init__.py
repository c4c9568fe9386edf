"""View of a running server."""

from __future__ import annotations


class TopError(Exception):
    """No server to show; the message says what to do."""
