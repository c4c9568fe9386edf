"""The output of one request: that of each of its `n` sequences, which share a prompt and end one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidewheel.engine.messages import WHOLE_REQUEST, Delta, RequestStats
from tidewheel.frontend.output import OutputStream
from tidewheel.frontend.values import PerfMetrics, Response


class Outputs:
    """Used by one thread at a time. `open_streams` is called with the first output: a refused request costs none."""

    def __init__(
        self, open_streams: Callable[[], list[OutputStream]], num_input_tokens: int, arrival_ns: int
    ) -> None:
        self.num_input_tokens = num_input_tokens
        self._open_streams = open_streams
        self._streams: list[OutputStream] = []
        self._arrival_ns = arrival_ns
        self._perf: dict[int, PerfMetrics] = {}  # by index, of sequences that the engine ended

    @property
    def is_over(self) -> bool:
        return bool(self._streams) and all(stream.finish_reason is not None for stream in self._streams)

    @property
    def has_news(self) -> bool:
        return any(stream.has_news for stream in self._streams)

    def push(self, deltas: Iterable[Delta]) -> list[int]:
        """Return the sequences that a stop string ended: the engine goes on with them until it is told."""
        return [delta.index for delta in deltas if delta.index != WHOLE_REQUEST and self._push(delta)]

    def end(self, finish_reason: str) -> None:
        """Ends the sequences that have not ended."""
        for stream in self._opened():
            stream.end(finish_reason)

    def take(self) -> Response:
        """Return what is new of all sequences."""
        return [stream.take(self._perf.get(index)) for index, stream in enumerate(self._opened())]

    def _opened(self) -> list[OutputStream]:
        self._streams = self._streams or self._open_streams()
        return self._streams

    def _push(self, delta: Delta) -> bool:
        if delta.stats is not None:
            self._perf[delta.index] = self._to_perf(delta.stats)
        if delta.error is not None and not delta.token_ids:
            return False
        stream = self._opened()[delta.index]
        was_over = stream.finish_reason is not None
        stream.push(delta)
        if not delta.finish_reason:
            return stream.finish_reason is not None and not was_over
        if delta.error is None:
            stream.end(delta.finish_reason)
        return False

    def _to_perf(self, stats: RequestStats) -> PerfMetrics:
        return PerfMetrics(
            arrival_ns=self._arrival_ns,
            first_scheduled_ns=stats.first_scheduled_ns,
            first_token_ns=stats.first_token_ns,
            last_token_ns=stats.last_token_ns,
            num_reused_blocks=stats.num_reused_blocks,
            num_new_blocks=stats.num_new_blocks,
            priority=stats.priority,
        )
