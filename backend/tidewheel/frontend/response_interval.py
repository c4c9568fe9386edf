from __future__ import annotations

import os

from tidewheel.processor_use import ProcessorMeter, ProcessorUse

LOOK_S = 0.25  # between two readings of the processors' use
# Of the available processors, for turns. All else on the way of a response costs as much again, or more.
SHARE = 0.35
MAX_STRETCH = 12.5  # of `stream_interval_ms`, while processors are short
_LOOK_SMOOTHING, _TURN_SMOOTHING = 0.5, 1 / 32


class ResponseInterval:
    """Interval between responses of a stream that keeps senders' turns within a budget of processor time.

    When another process takes processors, fewer responses with more tokens leave the engine its time.
    """

    def __init__(self, num_processors: int) -> None:
        self._num_processors = num_processors
        self._available = float(num_processors)
        self._turn_s = 0.0  # processor time of a turn, smoothed

    def observe(self, use: ProcessorUse) -> None:
        """Take the use by this server. A neighbour takes all that the server leaves: half counts as available."""
        available = min(max(use.used + use.idle, 0.5 * self._num_processors), self._num_processors)
        self._available += (available - self._available) * _LOOK_SMOOTHING

    def add_turn(self, processor_s: float) -> None:
        self._turn_s += (processor_s - self._turn_s) * _TURN_SMOOTHING

    def seconds(self, num_streams: int) -> float:
        return num_streams * self._turn_s / (SHARE * self._available)


class MeasuredInterval(ResponseInterval):
    """`ResponseInterval` with readings of this process, its parent (Triton's server) and the engine."""

    def __init__(self, engine_pid: int) -> None:
        super().__init__(len(os.sched_getaffinity(0)))
        self._meter = ProcessorMeter((os.getppid(), engine_pid))
        self._next_look = 0.0

    def look(self, now: float) -> None:
        """Read the processors' use if a reading is due."""
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            if (use := self._meter.read()) is not None:
                self.observe(use)
