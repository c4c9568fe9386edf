from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "note"]


class Problem(NamedTuple):
    """Finding of a rule: what is wrong, with the value, and what to do."""

    severity: Severity
    field: str  # such as `parameters.dtype`; empty: the file as a whole
    message: str
    right_name: str = ""  # instead of the last part of `field`
    file: Path | None = None  # None: the entry's config.pbtxt


def error(field: str, message: str, *, right_name: str = "", file: Path | None = None) -> Problem:
    """Say that the server refuses the entry, or answers other than it says."""
    return Problem("error", field, message, right_name, file)


def warning(field: str, message: str) -> Problem:
    """Say that the entry works in another way than was meant, most likely."""
    return Problem("warning", field, message)


def note(field: str, message: str) -> Problem:
    return Problem("note", field, message)


class Edit(NamedTuple):
    """Replacement of a piece of a file."""

    start: int  # offset
    old: str
    new: str


class Finding(NamedTuple):
    """Problem with its rule and place. Order of fields: that of `--json`."""

    rule: str
    severity: Severity
    file: str
    line: int | None  # from 1, like columns; None: the file or folder as a whole
    column: int | None
    field: str
    message: str
    edit: Edit | None = None  # that mends it
