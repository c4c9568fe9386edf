"""Figures and labels of a request that has ended. They hold nothing of its prompt and output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tidewheel.engine.messages import AddRequest, RequestStats
from tidewheel.errors import Cancelled, TidewheelError
from tidewheel.frontend.interface import GenerateRequest, Response, Task
from tidewheel.frontend.live_request import LiveRequest
from tidewheel.request import FinishReason

_NS_PER_MS = 1e6


class Stages(NamedTuple):
    """Moments of the monotonic clock; 0: never, or unknown."""

    arrival_ns: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    end_ns: int = 0

    def ms(self, begin: int, end: int) -> float | None:
        return round((end - begin) / _NS_PER_MS, 3) if begin and end else None

    @property
    def queue_ms(self) -> float | None:
        return self.ms(self.arrival_ns, self.scheduled_ns)

    @property
    def prefill_ms(self) -> float | None:
        return self.ms(self.scheduled_ns, self.first_token_ns)

    @property
    def time_to_first_token_ms(self) -> float | None:
        return self.ms(self.arrival_ns, self.first_token_ns)

    @property
    def decode_ms(self) -> float | None:
        return self.ms(self.first_token_ns, self.last_token_ns)

    @property
    def total_ms(self) -> float | None:
        return self.ms(self.arrival_ns, self.end_ns)


class EndedRequest(NamedTuple):
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
        return self.stages.ms(self.stages.arrival_ns, self.deadline_ns)

    @classmethod
    def of(
        cls, request: LiveRequest, end_ns: int, response: Response = (), error: TidewheelError | None = None
    ) -> EndedRequest:
        """Describe a request by its last response or its error. Times of sequences are those from first to last."""
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
            num_sequences=request.message.n if isinstance(request.message, AddRequest) else 1,
            num_prompt_tokens=0 if outputs is None else outputs.num_input_tokens,
            num_cached_tokens=stats[0].num_cached_tokens if stats else None,
            num_preemptions=sum(one.num_preemptions for one in stats) if stats else None,
            num_output_tokens=0 if outputs is None else sum(outputs.num_output_tokens),
            num_responses=request.num_responses,
        )

    @classmethod
    def refused(cls, request_id: str, arrival_ns: int, end_ns: int, error: TidewheelError) -> EndedRequest:
        """Describe a request that could not be read."""
        asked = GenerateRequest(request_id=request_id)
        stages = Stages(arrival_ns, end_ns=end_ns)
        return cls(request_id, asked.task, False, 0, "", False, "", 0, stages, tag=error.tag)


def _stages(request: LiveRequest, stats: list[RequestStats], end_ns: int) -> Stages:
    """A first token that the engine did not tell of is known to the front end, which has it a little later."""
    return Stages(
        request.arrival_ns,
        scheduled_ns=_least(one.first_scheduled_ns for one in stats),
        first_token_ns=_least(one.first_token_ns for one in stats) or request.first_output_ns,
        last_token_ns=max((one.last_token_ns for one in stats), default=0),
        end_ns=end_ns,
    )


def _least(moments: Iterable[int]) -> int:
    return min((moment for moment in moments if moment), default=0)
