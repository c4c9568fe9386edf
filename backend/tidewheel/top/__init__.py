"""Live view of a running server: `tidewheel top`."""

from __future__ import annotations


class TopError(Exception):
    """No server to show; the message says what to do."""
