from __future__ import annotations


class BenchError(Exception):
    """Measurement impossible as asked; one line says what to change."""


class RequestFailed(Exception):
    """Failed request. `code` groups errors in reports; `message` is the server's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
