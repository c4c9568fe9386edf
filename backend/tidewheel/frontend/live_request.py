"""A request from submission to its last response, and its figures at the end.

    submitted ── attach ──► at the engine ── deltas ──►┐
        │                    │        ▲                ├──► over ── mark_answered ──► answered
        │                    └─ held ─┘                │
        └── end (error, cancel) ─┴── end ──────────────┘

The first end counts: last delta, cancel, error or deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from tidewheel.engine.messages import WHOLE_REQUEST, AddRequest, CloseSession, Delta, RequestStats
from tidewheel.errors import Cancelled, DeadlineExceeded, TidewheelError
from tidewheel.frontend.interface import GenerateRequest, Response, Sink, Task
from tidewheel.frontend.output import Outputs
from tidewheel.frontend.request_parameters import Urgency
from tidewheel.frontend.request_reader import PreparedRequest
from tidewheel.request import FinishReason

_NS_PER_MS = 1e6


class Ending(NamedTuple):
    """End of a request: an error, or the finish reason of its open sequences."""

    finish_reason: str = ""
    error: TidewheelError | None = None


class LiveRequest:
    """State that the threads of a request share."""

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
        self.wants_chunks = False  # before the end

    @property
    def is_over(self) -> bool:
        return self._ending is not None

    @property
    def has_deltas(self) -> bool:
        return bool(self._deltas)

    @property
    def is_at_engine(self) -> bool:
        return self._is_at_engine

    def attach(self, prepared: PreparedRequest) -> None:
        """Set the message. Without stream and stop strings, the only turn is at the end."""
        with self._lock:
            self.outputs = prepared.outputs
            self.message = prepared.message
            self.answer = prepared.answer
            if isinstance(prepared.message, AddRequest):
                self._num_open = prepared.message.options.n
            self.wants_chunks = self.asked.stream or prepared.has_stop_strings

    def mark_sent(self) -> bool:
        """Return False if the engine must drop the request, which has ended."""
        with self._lock:
            self._is_at_engine = True
            return self._ending is None or self._num_open == 0

    def mark_held(self) -> bool:
        """Return False if the request is over."""
        with self._lock:
            self._is_at_engine = self.is_known_to_engine = False
            return self._ending is None

    def receive_first(self) -> bool:
        """Return whether to queue a turn."""
        with self._lock:
            self.has_output = self.was_accepted = True
            return self.wants_chunks and self._ending is None and self.claim_turn()

    def receive(self, delta: Delta) -> bool:
        """Return whether to queue a turn."""
        with self._lock:
            is_first = bool(delta.token_ids) and not self.has_output
            self.has_output = self.has_output or is_first
            self.was_accepted = self.was_accepted or delta.stats is not None or is_first
            ending = self._count_end(delta) if delta.finish_reason else None
            if self._ending is not None:
                return False
            self._deltas.append(delta)
            self._ending = ending
            return (ending is not None or (is_first and self.wants_chunks)) and self.claim_turn()

    def end(self, ending: Ending) -> bool:
        """Set the first ending. Return True, once, if the engine must drop the request."""
        with self._lock:
            if self._ending is None:
                self._ending = ending
                if ending.error is not None:  # whose frames hold the request and its prompt
                    ending.error.__traceback__ = ending.error.__context__ = None
            must_tell = self._is_at_engine and self._num_open > 0
            self._is_at_engine = False
            return must_tell

    def claim_turn(self) -> bool:
        with self._lock:
            if self._has_turn or self._is_answered:
                return False
            self._has_turn = True
            return True

    def take_output(self) -> tuple[list[Delta], Ending | None]:
        with self._lock:
            deltas, self._deltas = self._deltas, []
            return deltas, self._ending

    def mark_answered(self) -> bool:
        """Return True if the engine must drop the request."""
        with self._lock:
            self._is_answered = True
            self._deltas.clear()
            return self.end(Ending())

    def end_turn(self) -> bool:
        """Return whether to queue another turn."""
        with self._lock:
            self._has_turn = not self._is_answered and self._ending is not None
            return self._has_turn

    def _count_end(self, delta: Delta) -> Ending | None:
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


class Stages(NamedTuple):
    """Moments of the monotonic clock in nanoseconds; 0: never, or unknown."""

    arrival_ns: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    end_ns: int = 0


def milliseconds(begin_ns: int, end_ns: int) -> float | None:
    """Return the time between two known moments."""
    return round((end_ns - begin_ns) / _NS_PER_MS, 3) if begin_ns and end_ns else None


class EndedRequest(NamedTuple):
    """Figures and labels of a request that has ended, without prompt and output."""

    request_id: str
    task: Task
    is_streamed: bool
    priority: int  # granted class
    tenant: str
    has_session: bool
    traceparent: str  # of the client or of Triton; empty: none
    deadline_ns: int  # 0: none
    stages: Stages
    finish_reason: str = ""  # empty: an error
    tag: str = ""  # of the error
    num_sequences: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None  # None: it ended before figures of the engine came
    num_preemptions: int | None = None
    num_output_tokens: int = 0
    num_responses: int = 0

    @property
    def is_cancelled(self) -> bool:
        return self.finish_reason == FinishReason.CANCELLED or self.tag == Cancelled.tag

    @property
    def deadline_ms(self) -> float | None:
        return milliseconds(self.stages.arrival_ns, self.deadline_ns)

    @classmethod
    def of(
        cls, request: LiveRequest, end_ns: int, response: Response = (), error: TidewheelError | None = None
    ) -> EndedRequest:
        stats = [chunk.stats for chunk in response if chunk.stats is not None]
        urgency, outputs = request.urgency, request.outputs
        return cls(
            request_id=request.asked.request_id,
            task=request.asked.task,
            is_streamed=request.asked.stream,
            priority=stats[0].priority if stats else int(urgency.priority),
            tenant=urgency.tenant,
            has_session=urgency.has_session,
            traceparent=request.asked.traceparent,
            deadline_ns=urgency.deadline_ns,
            stages=_stages(request, stats, end_ns),
            finish_reason=(response[0].finish_reason or "") if response else "",
            tag="" if error is None else error.tag,
            num_sequences=request.message.options.n if isinstance(request.message, AddRequest) else 1,
            num_prompt_tokens=0 if outputs is None else outputs.num_input_tokens,
            num_cached_tokens=stats[0].num_cached_tokens if stats else None,
            num_preemptions=sum(one.num_preemptions for one in stats) if stats else None,
            num_output_tokens=0 if outputs is None else sum(outputs.num_output_tokens),
            num_responses=request.num_responses,
        )

    @classmethod
    def refused(cls, request_id: str, arrival_ns: int, end_ns: int, error: TidewheelError) -> EndedRequest:
        asked = GenerateRequest(request_id=request_id)
        stages = Stages(arrival_ns, end_ns=end_ns)
        return cls(request_id, asked.task, False, 0, "", False, "", 0, stages, tag=error.tag)


def _stages(request: LiveRequest, stats: list[RequestStats], end_ns: int) -> Stages:
    """Return the moments of the first sequence to begin and the last to end."""
    return Stages(
        request.arrival_ns,
        scheduled_ns=_least(one.first_scheduled_ns for one in stats),
        first_token_ns=_least(one.first_token_ns for one in stats) or request.first_output_ns,
        last_token_ns=max((one.last_token_ns for one in stats), default=0),
        end_ns=end_ns,
    )


def _least(moments: Iterable[int]) -> int:
    return min((moment for moment in moments if moment), default=0)
