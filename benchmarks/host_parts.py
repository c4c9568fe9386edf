"""Times of the host's parts of a step, by wrapping live objects' methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Segment(NamedTuple):
    part: str
    begin: float
    end: float


class Parts:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.segments: list[Segment] = []
        self._clock = clock
        self._stack: list[str] = []
        self._since = 0.0

    def wrap(self, owner: object, names: str, part: str) -> None:
        """Count these methods of `owner` as `part`, without calls into other parts."""
        for name in names.split():
            setattr(owner, name, self.wrapped(getattr(owner, name), part))

    def wrapped(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return call

    def _enter(self, part: str) -> None:
        self._cut()
        self._stack.append(part)

    def _leave(self) -> None:
        self._cut()
        self._stack.pop()

    def _cut(self) -> None:
        now = self._clock()
        if self._stack:
            self.segments.append(Segment(self._stack[-1], self._since, now))
        self._since = now

    def between(self, begin: float, end: float) -> list[Segment]:
        return [segment for segment in self.segments if segment.begin >= begin and segment.end <= end]


def seconds_by_step(segments: list[Segment], ends: list[float]) -> dict[str, list[float]]:
    """Return seconds by part and step; `ends` starts with the first step's begin."""
    steps = np.searchsorted(ends, [segment.begin for segment in segments], side="right") - 1
    found = {part: [0.0] * (len(ends) - 1) for part in dict.fromkeys(segment.part for segment in segments)}
    for segment, step in zip(segments, steps.tolist(), strict=True):
        if 0 <= step < len(ends) - 1:
            found[segment.part][step] += segment.end - segment.begin
    return found
