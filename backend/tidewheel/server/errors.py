from __future__ import annotations


class ServeError(Exception):
    """The server cannot start, or a part died. The message says in one line what to change."""
