from __future__ import annotations

from tidewheel.processor_use import ProcessorUse

# Of the available processors, for turns; the rest of a response costs at least as much again.
SHARE = 0.35
MAX_STRETCH = 12.5  # of the longest interval, while processors are short
_LOAD = 0.7  # of the senders' time, for all streams in turn
_USE_SMOOTHING, _TURN_SMOOTHING = 0.5, 1 / 32


class ResponseInterval:
    """Interval between a stream's responses: 0 while senders keep up, at most `longest_s`.

    It is longer to keep senders within a budget of processor time: beside a busy process, fewer and larger responses
    leave the engine its time.
    """

    def __init__(self, longest_s: float, num_senders: int, num_processors: int) -> None:
        self._longest_s, self._num_senders, self._num_processors = longest_s, num_senders, num_processors
        self._available = float(num_processors)
        self._turn_s = self._turn_processor_s = 0.0  # smoothed

    def observe(self, use: ProcessorUse) -> None:
        """Update the available processors: used by this server or idle, at least half: others take idle ones."""
        available = min(max(use.used + use.idle, 0.5 * self._num_processors), self._num_processors)
        self._available += (available - self._available) * _USE_SMOOTHING

    def add_turn(self, seconds: float, processor_s: float) -> None:
        self._turn_s += (seconds - self._turn_s) * _TURN_SMOOTHING
        self._turn_processor_s += (processor_s - self._turn_processor_s) * _TURN_SMOOTHING

    def seconds(self, num_streams: int) -> float:
        keeps_up_s = num_streams * self._turn_s / self._num_senders / _LOAD
        budgeted_s = num_streams * self._turn_processor_s / (SHARE * self._available)
        return max(min(self._longest_s, keeps_up_s), min(MAX_STRETCH * self._longest_s, budgeted_s))
