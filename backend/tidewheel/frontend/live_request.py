"""A request from submission to its last response: the only state that its threads share.

    submitted ── attach ──► at the engine ── deltas ──►┐
        │                    │        ▲                ├──► over ── mark_answered ──► answered
        │                    └─ held ─┘                │
        └── end (error, cancel) ─┴── end ──────────────┘

The first end counts: last delta, cancel, error or deadline.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from tidewheel.engine.messages import WHOLE_REQUEST, AddRequest, CloseSession, Delta
from tidewheel.errors import DeadlineExceeded, TidewheelError
from tidewheel.frontend.interface import GenerateRequest, Sink
from tidewheel.frontend.output import Outputs
from tidewheel.frontend.preparation import Prepared, Urgency
from tidewheel.request import FinishReason


class Ending(NamedTuple):
    """Error, or finish reason of the open sequences."""

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
        self.is_known_to_engine = False  # which watches its deadline
        self.was_accepted = False  # has tokens, or an end that is no refusal
        self.has_output = False
        self.first_output_ns = 0  # when the first token came here
        self.num_responses = 0  # used only in turns
        self.last_token_ns: dict[int, int] = {}  # of all sequences but the first; of the listener thread
        self.outputs: Outputs | None = None  # used only in turns
        self.message: AddRequest | CloseSession | None = None
        self.answer = ""  # where nothing is generated
        self._lock = threading.RLock()
        self._deltas: list[Delta] = []
        self._ending: Ending | None = None
        self._num_open = 1  # sequences not ended by the engine
        self._expired: DeadlineExceeded | None = None  # error of a sequence that never started
        self._has_outlived = False  # another sequence ended otherwise
        self._is_at_engine = False
        self._has_turn = False  # queued or running
        self._is_answered = False
        self.wants_news = False  # before the end

    @property
    def is_over(self) -> bool:
        return self._ending is not None

    @property
    def has_deltas(self) -> bool:
        return bool(self._deltas)

    @property
    def is_at_engine(self) -> bool:
        return self._is_at_engine

    def attach(self, prepared: Prepared) -> None:
        """Set the message. Without streaming and stop strings, the only turn is at the end."""
        with self._lock:
            self.outputs = prepared.outputs
            self.message = prepared.message
            self.answer = prepared.answer
            if isinstance(prepared.message, AddRequest):
                self._num_open = prepared.message.n
            self.wants_news = self.asked.stream or prepared.has_stop_strings

    def mark_sent(self) -> bool:
        """Return False if the engine must be told of an end."""
        with self._lock:
            self._is_at_engine = True
            return self._ending is None or self._num_open == 0

    def mark_held(self) -> bool:
        """Note that the engine had no room. Return False if the request is over."""
        with self._lock:
            self._is_at_engine = self.is_known_to_engine = False
            return self._ending is None

    def receive_first(self) -> bool:
        """Note the first token. Return whether to queue a turn."""
        with self._lock:
            self.has_output = self.was_accepted = True
            return self.wants_news and self._ending is None and self.claim_turn()

    def receive(self, delta: Delta) -> bool:
        """Add news. Return whether to queue a turn, which first tokens and ends get at once."""
        with self._lock:
            is_first = bool(delta.token_ids) and not self.has_output
            self.has_output = self.has_output or is_first
            self.was_accepted = self.was_accepted or delta.stats is not None or is_first
            ending = self._count_end(delta) if delta.finish_reason else None
            if self._ending is not None:
                return False
            self._deltas.append(delta)
            self._ending = ending
            return (ending is not None or (is_first and self.wants_news)) and self.claim_turn()

    def end(self, ending: Ending) -> bool:
        """Set the first ending. Return True, once, if the engine must be told."""
        with self._lock:
            if self._ending is None:
                self._ending = ending
                if ending.error is not None:  # whose frames hold the request and its prompt
                    ending.error.__traceback__ = ending.error.__context__ = None
            must_tell = self._is_at_engine and self._num_open > 0
            self._is_at_engine = False
            return must_tell

    def claim_turn(self) -> bool:
        """Return whether a turn must be queued."""
        with self._lock:
            if self._has_turn or self._is_answered:
                return False
            self._has_turn = True
            return True

    def take_news(self) -> tuple[list[Delta], Ending | None]:
        with self._lock:
            deltas, self._deltas = self._deltas, []
            return deltas, self._ending

    def mark_answered(self) -> bool:
        """Return True if the engine must be told."""
        with self._lock:
            self._is_answered = True
            self._deltas.clear()
            return self.end(Ending())

    def end_turn(self) -> bool:
        """Return whether another turn is needed."""
        with self._lock:
            self._has_turn = not self._is_answered and self._ending is not None
            return self._has_turn

    def _count_end(self, delta: Delta) -> Ending | None:
        """Return the request's ending, if this is one."""
        error = None if delta.error is None else delta.error.to_error()
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
