"""The output of one request: that of each of its `n` sequences, which share a prompt and end one by one."""

from __future__ import annotations

from collections.abc import Iterable

from tidewheel.engine.messages import WHOLE_REQUEST, Delta, RequestStats
from tidewheel.frontend.output import OutputStream
from tidewheel.frontend.values import PerfMetrics, Response


class Outputs:
    """Used by one thread at a time."""

    def __init__(self, streams: list[OutputStream], arrival_ns: int) -> None:
        self._streams = streams
        self._arrival_ns = arrival_ns
        self._perf: list[PerfMetrics | None] = [None] * len(streams)

    @property
    def num_input_tokens(self) -> int:
        return self._streams[0].num_input_tokens

    @property
    def is_over(self) -> bool:
        return all(stream.finish_reason is not None for stream in self._streams)

    @property
    def has_news(self) -> bool:
        return any(stream.has_news for stream in self._streams)

    def push(self, deltas: Iterable[Delta]) -> list[int]:
        """Indices of the sequences that a stop string ended: the engine goes on with them until it is told."""
        return [delta.index for delta in deltas if delta.index != WHOLE_REQUEST and self._push(delta)]

    def end(self, finish_reason: str) -> None:
        """Ends the sequences that have not ended."""
        for stream in self._streams:
            stream.end(finish_reason)

    def take(self) -> Response:
        """What is new of all sequences."""
        return [stream.take(perf) for stream, perf in zip(self._streams, self._perf, strict=True)]

    def _push(self, delta: Delta) -> bool:
        stream = self._streams[delta.index]
        was_over = stream.finish_reason is not None
        stream.push(delta)
        if not delta.finish_reason:
            return stream.finish_reason is not None and not was_over
        if delta.error is None:
            stream.end(delta.finish_reason)
        if delta.stats is not None:
            self._perf[delta.index] = self._to_perf(delta.stats)
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
