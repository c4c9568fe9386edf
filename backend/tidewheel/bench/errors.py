"""What ends a measurement before its time."""

from __future__ import annotations


class BenchError(Exception):
    """Nothing can be measured as asked: one line that says what to change."""


class RequestFailed(Exception):
    """One request got an error. `code` groups errors in reports; `message` is the server's own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
