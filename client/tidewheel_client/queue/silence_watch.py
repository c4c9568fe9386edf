"""Which workers of a queue are gone, told from their beats."""

from __future__ import annotations

from collections.abc import Mapping


class SilenceWatch:
    """Finder of workers whose beat is the same in many looks in a row.

    Looks are counted and no clock is read: a clock that is set, a Redis that is away, and a machine that is paused
    all stop the looks along with the beats.
    """

    def __init__(self, most_equal: int) -> None:
        self._most_equal = most_equal
        self._seen: dict[str, tuple[str, int]] = {}  # by worker: its beat, and how often it came again

    def look(self, beats: Mapping[str, str]) -> dict[str, str]:
        """Return the workers that are gone, with their last beats."""
        seen = {}
        for worker, beat in beats.items():
            last, times = self._seen.get(worker, ("", 0))
            seen[worker] = (beat, times + 1 if worker in self._seen and beat == last else 0)
        self._seen = seen
        return {worker: beat for worker, (beat, times) in seen.items() if times >= self._most_equal}
