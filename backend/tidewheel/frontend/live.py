"""A request between its submission and its last response. All its threads meet here and nowhere else.

    submitted ── begin ──► at the engine ── deltas ──►┐
        │                   │        ▲                ├──► over ── close ──► answered
        │                   └─ hold ─┘                │
        └── end (error, cancel) ─┴── end ─────────────┘

The first end counts: the last delta of the last sequence, a cancel, an error or a deadline. Responses are sent in
turns, one at a time, so the request is answered once and in order.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from tidewheel.engine.messages import WHOLE_REQUEST, AddRequest, CloseSession, Delta
from tidewheel.errors import DeadlineExceeded, TidewheelError, from_wire
from tidewheel.frontend.output import Outputs
from tidewheel.frontend.parameters import Urgency
from tidewheel.frontend.preparation import Prepared
from tidewheel.frontend.values import GenerateRequest, Sink
from tidewheel.request import FinishReason


class Ending(NamedTuple):
    """Why a request is over: an error, or the finish reason of the sequences that have none of their own."""

    finish_reason: str = ""
    error: TidewheelError | None = None


class LiveRequest:
    def __init__(
        self, key: int, asked: GenerateRequest, sink: Sink, arrival_ns: int, urgency: Urgency | None = None
    ) -> None:
        self.key = key
        self.asked = asked
        self.sink = sink
        self.arrival_ns = arrival_ns
        self.urgency = urgency or Urgency()
        self.is_heard = False  # the engine knows it, and watches its deadline
        self.was_accepted = False  # the scheduler took it: it has tokens, or an end that is no refusal
        self.last_token_ns: dict[int, int] = {}  # by sequence; only the engine's listener thread writes it
        self.outputs: Outputs | None = None  # from `begin` on; only turns use it
        self.message: AddRequest | CloseSession | None = None  # what the engine gets
        self._lock = threading.RLock()
        self._deltas: list[Delta] = []
        self._ending: Ending | None = None
        self._num_open = 1  # sequences that the engine has not ended
        self._expired: DeadlineExceeded | None = None  # error of a sequence that never started
        self._has_outlived = False  # a sequence ended in another way
        self._is_at_engine = False
        self._has_turn = False  # waiting or running
        self._is_answered = False
        self._needs_every_delta = False

    @property
    def has_begun(self) -> bool:
        """True once it has tokens."""
        return bool(self.last_token_ns)

    @property
    def is_over(self) -> bool:
        return self._ending is not None

    def begin(self, prepared: Prepared) -> None:
        """Call before the engine gets it. Without streaming and stop strings, its only turn is at its end."""
        with self._lock:
            self.outputs = prepared.outputs
            self.message = prepared.message
            if isinstance(prepared.message, AddRequest):
                self._num_open = prepared.message.n
            self._needs_every_delta = self.asked.stream or prepared.has_stop_strings

    def begun(self) -> bool:
        """Call after the engine got it. Return False if it ended meanwhile, so that the engine must be told."""
        with self._lock:
            self._is_at_engine = True
            return self._ending is None or self._num_open == 0

    def hold(self) -> bool:
        """Note that the engine refused it for want of room. Return False if it is over anyway."""
        with self._lock:
            self._is_at_engine = self.is_heard = False
            return self._ending is None

    def post(self, delta: Delta) -> bool:
        """Take news of the engine. Return whether it needs a turn now."""
        with self._lock:
            self.was_accepted = self.was_accepted or delta.stats is not None or bool(delta.token_ids)
            ending = self._count_end(delta) if delta.finish_reason else None
            if self._ending is not None:
                return False
            self._deltas.append(delta)
            self._ending = ending
            if ending is None and not self._needs_every_delta:
                return False
            return self.claim_turn()

    def end(self, ending: Ending) -> bool:
        """Set the ending if it is the first. Return True, once, if the engine works on it and must be told."""
        with self._lock:
            if self._ending is None:
                self._ending = ending
            must_tell = self._is_at_engine and self._num_open > 0
            self._is_at_engine = False
            return must_tell

    def claim_turn(self) -> bool:
        """Return whether the caller must queue it for a turn."""
        with self._lock:
            if self._has_turn or self._is_answered:
                return False
            self._has_turn = True
            return True

    def take(self) -> tuple[list[Delta], Ending | None]:
        """Begin a turn: return what is new, and how it ended if it did."""
        with self._lock:
            deltas, self._deltas = self._deltas, []
            return deltas, self._ending

    def close(self) -> bool:
        """Call before the last response. Return True if the engine still works on it and must be told."""
        with self._lock:
            self._is_answered = True
            self._deltas.clear()
            return self.end(Ending())

    def end_turn(self) -> bool:
        """Return whether something came in during the turn, so that it needs another."""
        with self._lock:
            has_news = bool(self._deltas) and self._needs_every_delta
            self._has_turn = not self._is_answered and (has_news or self._ending is not None)
            return self._has_turn

    def _count_end(self, delta: Delta) -> Ending | None:
        """Count the end of one sequence or of all. Return how the request ends, None if other sequences go on."""
        info = delta.error
        error = None if info is None else from_wire(info.tag, info.message, info.retry_after_ms)
        if delta.index == WHOLE_REQUEST:
            self._num_open = 0
            return Ending(delta.finish_reason, error)
        self._num_open -= 1
        if isinstance(error, DeadlineExceeded):
            self._expired = error
        elif error is not None:
            return Ending(error=error)
        else:
            self._has_outlived = True
        if self._num_open:
            return None
        if self._expired is None:
            return Ending(delta.finish_reason)
        return Ending(FinishReason.DEADLINE) if self._has_outlived else Ending(error=self._expired)
