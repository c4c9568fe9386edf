from __future__ import annotations

from tidewheel.processor_use import ProcessorUse

# Of the available processors, for turns; the rest of a response costs at least as much again.
SHARE = 0.35
MAX_STRETCH = 12.5  # of `stream_interval_ms`, while processors are short
_USE_SMOOTHING, _TURN_SMOOTHING = 0.5, 1 / 32


class ResponseInterval:
    """Interval between a stream's responses, which keeps senders within a budget of processor time.

    Beside a busy process, fewer and larger responses leave the engine its time.
    """

    def __init__(self, num_processors: int) -> None:
        self._num_processors = num_processors
        self._available = float(num_processors)
        self._turn_s = 0.0  # processor time of a turn, smoothed

    def observe(self, use: ProcessorUse) -> None:
        """Update the available processors: used by this server or idle, at least half: others take idle ones."""
        available = min(max(use.used + use.idle, 0.5 * self._num_processors), self._num_processors)
        self._available += (available - self._available) * _USE_SMOOTHING

    def add_turn(self, processor_s: float) -> None:
        self._turn_s += (processor_s - self._turn_s) * _TURN_SMOOTHING

    def seconds(self, num_streams: int) -> float:
        return num_streams * self._turn_s / (SHARE * self._available)
