"""Errors of requests, from `tidewheel_client.errors`, whose base class `RequestError` is `TidewheelError` here.

No client receives a `ConfigError` or `PermanentError`.
"""

import inspect

from tidewheel_client.errors import *  # noqa: F403
from tidewheel_client.errors import BY_TAG, InternalError, RequestError

MAX_MESSAGE_CHARS = 2000
TidewheelError = RequestError
TAGS: frozenset[str] = frozenset(BY_TAG)


class ConfigError(Exception):
    """Wrong setting or file; the message says what to change."""

    def __str__(self) -> str:
        return printable(super().__str__())


class PermanentError(ConfigError):
    """Failure of an engine that a restart cannot cure."""


def require(condition: bool, message: str) -> None:
    """Raise `InternalError` unless the condition holds, also under ``python -O``."""
    if not condition:
        raise InternalError(f"invariant broken: {message}")


def printable(message: str) -> str:
    """Escape lone surrogates and control characters, and cut long messages."""
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    encodable = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in encodable)


def cause_and_remedy(cls: type[TidewheelError]) -> tuple[str, str]:
    """Return the two paragraphs of an error class's docstring. Raise `ConfigError` for another number."""
    paragraphs = [" ".join(text.split()) for text in inspect.cleandoc(cls.__doc__ or "").split("\n\n")]
    if len(paragraphs) != 2:
        raise ConfigError(f"{cls.__name__} has {len(paragraphs)} paragraphs: write a cause and what to do")
    return paragraphs[0], paragraphs[1]
