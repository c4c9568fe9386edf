"""Figures as text, and types of fields that hold their function in the annotation."""

from __future__ import annotations

from typing import Annotated

from tidewheel.bench.tables import NOTHING, number
from tidewheel.errors import printable
from tidewheel.settings import shown_bytes


def name(text: str) -> str:
    return printable(text) or NOTHING


def count(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def per_second(value: float | None) -> str:
    return NOTHING if value is None else f"{number(value)}/s" if value else "0/s"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def size(num_bytes: int | None) -> str:
    return NOTHING if num_bytes is None else shown_bytes(num_bytes)


Name = Annotated[str, name]
Count = Annotated[float | None, count]
Number = Annotated[float | None, number]
Rate = Annotated[float | None, per_second]
Share = Annotated[float | None, percent]
Seconds = Annotated[float | None, duration]
Bytes = Annotated[int | None, size]
