"""Detect dead workers of a queue by heartbeats that stop changing."""

from __future__ import annotations

from collections.abc import Mapping


class SilenceWatch:
    """Detector of workers whose heartbeat stays the same in `most_equal` looks after the first.

    It counts looks and reads no clock, so a changed clock cannot declare a worker dead. While Redis is away or the
    machine is paused, looks stop along with the heartbeats.
    """

    def __init__(self, most_equal: int) -> None:
        self._most_equal = most_equal
        self._seen: dict[str, tuple[str, int]] = {}  # by worker: its beat, and how often it came again

    def look(self, beats: Mapping[str, str]) -> dict[str, str]:
        """Compare the heartbeats by worker with the last look. Return the dead workers with theirs."""
        seen = {}
        for worker, beat in beats.items():
            last, times = self._seen.get(worker, ("", 0))
            seen[worker] = (beat, times + 1 if worker in self._seen and beat == last else 0)
        self._seen = seen
        return {worker: beat for worker, (beat, times) in seen.items() if times >= self._most_equal}
