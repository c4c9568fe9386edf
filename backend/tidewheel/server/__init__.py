"""Finding, starting and supervising a tritonserver."""

from typing import Literal, NamedTuple

State = Literal["starting", "ready", "restarting", "draining", "failed"]


class Condition(NamedTuple):
    """State of a supervised server, with the reason for one that is not ready."""

    state: State
    reason: str = ""


class ServeError(Exception):
    """Failed start or dead part of a server, in one line that says what to change."""


class CrashLoop(ServeError):
    """Too many deaths, after which another start would not help."""
