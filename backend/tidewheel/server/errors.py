"""What ends `tidewheel serve` before its time."""

from __future__ import annotations


class ServeError(Exception):
    """The server cannot start, or a part of it died. One line that says what to change."""
