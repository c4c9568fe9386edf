"""Figures as short text."""

from __future__ import annotations

from tidewheel.bench.text_tables import NOTHING, number

__all__ = ["NOTHING", "bar", "count", "duration", "number", "per_second", "percent"]

_FULL, _EMPTY = "█", "░"


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


def bar(share: float | None, width: int = 8) -> str:
    if share is None:
        return NOTHING
    full = round(min(max(share, 0.0), 1.0) * width)
    return f"{_FULL * full}{_EMPTY * (width - full)} {percent(share)}"
