"""A request between its submission and its last response: the one place where its threads meet.

    submitted ── begin ──► at the engine ── deltas ──►┐
        │                        │                    ├──► over ── close ──► answered
        └── end (error, cancel) ─┴── end ─────────────┘

Whoever ends it first decides how: the engine's last delta, a cancel, an error, a stop string. All responses are sent
from its turns, of which there is one at a time, so it is answered once and in order.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from tidewheel.engine.messages import Delta, RequestStats
from tidewheel.errors import InternalError, TidewheelError, from_wire
from tidewheel.frontend.output import OutputStream
from tidewheel.frontend.values import GenerateRequest, PerfMetrics, Sink


class Ending(NamedTuple):
    """Why a request is over: a finish reason, or an error."""

    finish_reason: str = ""
    error: TidewheelError | None = None
    stats: RequestStats | None = None

    @classmethod
    def of(cls, delta: Delta) -> Ending:
        """Of the last delta of a request."""
        if delta.error is not None:
            return cls(error=from_wire(delta.error.tag, delta.error.message, delta.error.retry_after_ms))
        if delta.finish_reason == "error":
            return cls(error=InternalError("the engine ended the request without saying why"))
        return cls(delta.finish_reason, None, delta.stats)


class News(NamedTuple):
    deltas: list[Delta]
    ending: Ending | None


class LiveRequest:
    def __init__(self, key: int, asked: GenerateRequest, sink: Sink, arrival_ns: int) -> None:
        self.key = key
        self.asked = asked
        self.is_streamed = asked.stream
        self.sink = sink
        self.arrival_ns = arrival_ns
        self.last_token_ns = 0  # written by the engine's listener thread alone
        self.output: OutputStream | None = None  # from `begin` on; used in turns alone
        self._lock = threading.Lock()
        self._deltas: list[Delta] = []
        self._ending: Ending | None = None
        self._is_at_engine = False
        self._has_turn = False  # waits for one, or is in it
        self._is_answered = False
        self._needs_every_delta = False

    def begin(self, output: OutputStream, *, needs_every_delta: bool) -> bool:
        """Just before the engine gets it; False: it is over already. Without `needs_every_delta`, its turn comes
        when it is over and not before."""
        with self._lock:
            self.output = output
            self._needs_every_delta = needs_every_delta
            return self._ending is None

    def begun(self) -> bool:
        """Just after the engine got it; False: it ended meanwhile, and the engine has to be told."""
        with self._lock:
            self._is_at_engine = True
            return self._ending is None

    def post(self, delta: Delta) -> bool:
        """Takes news of the engine; True: it needs a turn now."""
        with self._lock:
            if self._ending is not None:
                return False
            self._deltas.append(delta)
            if delta.finish_reason:
                self._ending = Ending.of(delta)
                self._is_at_engine = False
            elif not self._needs_every_delta:
                return False
            return self._claim_turn()

    def end(self, ending: Ending) -> bool:
        """The first ending counts. True: the engine still works on it and has to be told."""
        with self._lock:
            if self._ending is not None:
                return False
            self._ending = ending
            return self._is_at_engine

    def claim_turn(self) -> bool:
        """True: it needs a turn, and the caller has to see to it."""
        with self._lock:
            return self._claim_turn()

    def take(self) -> News:
        """At the beginning of a turn."""
        with self._lock:
            deltas, self._deltas = self._deltas, []
            return News(deltas, self._ending)

    def close(self) -> None:
        """Its last response is being sent."""
        with self._lock:
            self._is_answered = True
            self._deltas.clear()

    def end_turn(self) -> bool:
        """True: something came in during the turn, and it needs another."""
        with self._lock:
            has_news = bool(self._deltas) and self._needs_every_delta
            self._has_turn = not self._is_answered and (has_news or self._ending is not None)
            return self._has_turn

    def perf(self, stats: RequestStats | None) -> PerfMetrics | None:
        if stats is None:
            return None
        return PerfMetrics(
            arrival_ns=self.arrival_ns,
            first_scheduled_ns=stats.first_scheduled_ns,
            first_token_ns=stats.first_token_ns,
            last_token_ns=stats.last_token_ns,
            num_reused_blocks=stats.num_reused_blocks,
            num_new_blocks=stats.num_new_blocks,
        )

    def _claim_turn(self) -> bool:
        if self._has_turn or self._is_answered:
            return False
        self._has_turn = True
        return True
