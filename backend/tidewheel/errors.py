"""Errors of requests, from `tidewheel_client.errors`, whose base class is named `TidewheelError` here, and
`ConfigError` with `PermanentError`, which are never sent to a client.
"""

from __future__ import annotations

import inspect

from tidewheel_client.errors import (
    BY_TAG,
    Busy,
    Cancelled,
    Code,
    DeadlineExceeded,
    Draining,
    EngineDead,
    InternalError,
    InvalidRequest,
    KvCacheFull,
    NotFound,
    NumericError,
    PromptTooLarge,
    Unsupported,
    WaitingSetFull,
    WrongKey,
    from_wire,
)
from tidewheel_client.errors import RequestError as TidewheelError

__all__ = [
    "BY_TAG",
    "MAX_MESSAGE_CHARS",
    "TAGS",
    "Busy",
    "Cancelled",
    "Code",
    "ConfigError",
    "DeadlineExceeded",
    "Draining",
    "EngineDead",
    "InternalError",
    "InvalidRequest",
    "KvCacheFull",
    "NotFound",
    "NumericError",
    "PermanentError",
    "PromptTooLarge",
    "TidewheelError",
    "Unsupported",
    "WaitingSetFull",
    "WrongKey",
    "cause_and_remedy",
    "from_wire",
    "printable",
    "require",
]

MAX_MESSAGE_CHARS = 2000
TAGS: frozenset[str] = frozenset(BY_TAG)


class ConfigError(Exception):
    """A wrong setting or file. The message says in one line what to change."""

    def __str__(self) -> str:
        return printable(super().__str__())


class PermanentError(ConfigError):
    """A cause that stays when the engine starts again; more files, room or memory may remove any other cause."""


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
    """Return the two paragraphs of the class's docstring. Raise `ConfigError` unless there are two."""
    paragraphs = [" ".join(text.split()) for text in inspect.cleandoc(cls.__doc__ or "").split("\n\n")]
    if len(paragraphs) != 2:
        raise ConfigError(f"{cls.__name__} has {len(paragraphs)} paragraphs: write a cause and what to do")
    return paragraphs[0], paragraphs[1]
