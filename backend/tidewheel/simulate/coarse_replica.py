"""Replica with merged decode steps, fast enough for days of traffic.

Between two events decode steps have the same rows, and their time is a sum in closed form. Orders by class and
arrival; reserves a request's whole cache at its start; no preemption, prefix cache, sessions or deadlines.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from tidewheel.fleet.scaling import ReplicaReport
from tidewheel.record.recorded_events import StepFeatures
from tidewheel.request import FinishReason, Priority
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.outcomes import Told
from tidewheel.simulate.trace_requests import TraceRequests


class CoarseLimits(NamedTuple):
    max_num_seqs: int
    max_num_batched_tokens: int
    num_cache_tokens: int


@dataclass(slots=True)
class CoarseRequest:
    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    output_token_ids: range  # as long as the output
    num_left: int
    finish_reason: FinishReason | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)


class CoarseChunk(NamedTuple):
    request: CoarseRequest
    num_tokens: int


class CoarseLaunch(NamedTuple):
    """Steps that the simulated device runs: one with prompt chunks, or several decodes."""

    begin: float
    chunks: list[CoarseChunk]
    num_steps: int
    first_seconds: float  # of the first step
    growth_seconds: float

    def seconds(self, num_steps: int) -> float:
        return self.first_seconds * num_steps + self.growth_seconds * (num_steps * (num_steps - 1) / 2)

    def steps_by(self, now: float) -> int:
        """Return how many whole steps the launch needs to reach `now`, at most all."""
        passed = now - self.begin
        if self.growth_seconds <= 1e-15:
            count = math.ceil(passed / self.first_seconds)
        else:
            half = self.first_seconds / self.growth_seconds - 0.5
            count = math.ceil(math.sqrt(half * half + 2 * passed / self.growth_seconds) - half)
        return min(max(count, 1), self.num_steps)


class CoarseReplica:
    def __init__(
        self,
        number: int,
        limits: CoarseLimits,
        cost: CostModel,
        requests: TraceRequests,
        started: Told,
        ended: Told,
    ) -> None:
        self.number = number
        self.num_steps = 0
        self.num_tokens = 0
        self.busy_seconds = 0.0
        self._limits = limits
        self._cost = cost
        self._requests = requests
        self._started = started
        self._ended = ended
        self._waiting: dict[Priority, deque[CoarseRequest]] = {service_class: deque() for service_class in Priority}
        self._num_waiting = 0
        self._prefilling: deque[CoarseRequest] = deque()
        self._decoding: list[tuple[int, int, CoarseRequest]] = []  # heap of (step of the last token, number, request)
        self._step = 0
        self._kv_tokens = 0
        self._reserved = 0
        self._launch: CoarseLaunch | None = None
        self._reported = (0.0, 0)

    def submit(self, now: float, index: int) -> float | None:
        trace = self._requests.trace
        num_prompt_tokens = int(trace.prompt_tokens[index])
        output = range(self._requests.num_output_tokens(index))
        request = CoarseRequest(str(index), now, num_prompt_tokens, output, num_prompt_tokens)
        self._waiting[Priority(int(trace.priorities[index]))].append(request)
        self._num_waiting += 1
        launch = self._launch
        if launch is None:
            return now
        if launch.chunks or launch.num_steps == 1:
            return None
        num_steps = launch.steps_by(now)  # the new request joins after the running step
        if num_steps == launch.num_steps:
            return None
        self._launch = launch._replace(num_steps=num_steps)
        return launch.begin + launch.seconds(num_steps)

    def turn(self, now: float) -> float | None:
        if self._launch is not None:
            self._apply(self._launch, now)
        chunks = self._plan()
        if not chunks and not self._decoding:
            self._launch = None
            return None
        self._launch = launch = self._launched(now, chunks)
        return now + launch.seconds(launch.num_steps)

    def report(self, now: float) -> ReplicaReport:
        (before, tokens), self._reported = self._reported, (now, self.num_tokens)
        heads = {service_class: queue[0] for service_class, queue in self._waiting.items() if queue}
        return ReplicaReport(
            name=str(self.number),
            waiting=self._num_waiting,
            running=len(self._decoding) + len(self._prefilling),
            cache_usage=min(self._reserved / self._limits.num_cache_tokens, 1.0),
            tokens_per_s=(self.num_tokens - tokens) / max(now - before, 1e-9),
            queue_s={service_class: now - request.arrival_time for service_class, request in heads.items()},
        )

    def _plan(self) -> list[CoarseChunk]:
        budget = self._limits.max_num_batched_tokens - len(self._decoding)
        chunks: list[CoarseChunk] = []
        for request in self._prefilling:
            if budget <= 0:
                return chunks
            chunks.append(CoarseChunk(request, min(request.num_left, budget)))
            budget -= chunks[-1].num_tokens
        while budget > 0 and (admitted := self._admit()) is not None:
            chunks.append(CoarseChunk(admitted, min(admitted.num_left, budget)))
            budget -= chunks[-1].num_tokens
        return chunks

    def _admit(self) -> CoarseRequest | None:
        queue = next((queue for queue in self._waiting.values() if queue), None)
        if queue is None or len(self._decoding) + len(self._prefilling) >= self._limits.max_num_seqs:
            return None
        if self._reserved and self._reserved + queue[0].num_tokens > self._limits.num_cache_tokens:
            return None
        request = queue.popleft()
        self._num_waiting -= 1
        self._reserved += request.num_tokens
        self._prefilling.append(request)
        return request

    def _launched(self, now: float, chunks: list[CoarseChunk]) -> CoarseLaunch:
        num_decodes, num_new, num_samples, pairs, num_chunk_tokens, kv_tokens = len(self._decoding), 0, 0, 0, 0, 0
        for request, count in chunks:
            start = request.num_prompt_tokens - request.num_left
            if request.first_scheduled_time is None:
                request.first_scheduled_time = now
                num_new += 1
            num_samples += count == request.num_left
            num_chunk_tokens += count
            kv_tokens += start + count
            if count > 1:  # a chunk of one token is computed as a decode
                pairs += count * start + count * (count + 1) // 2
        num_rows = num_decodes + len(chunks)
        features = StepFeatures(
            num_rows=num_rows,
            num_tokens=num_decodes + num_chunk_tokens,
            num_samples=num_decodes + num_samples,
            num_new_rows=num_new,
            kv_tokens=self._kv_tokens + num_decodes + kv_tokens,
            chunk_pairs=pairs,
        )
        seconds = self._cost.step_seconds(features) + self._cost.turn_seconds(num_rows)
        num_steps = 1 if chunks else self._decoding[0][0] - self._step
        growth = num_decodes * self._cost.seconds_per_kv_byte * self._cost.kv_bytes_per_token
        return CoarseLaunch(now, chunks, num_steps, seconds, growth)

    def _apply(self, launch: CoarseLaunch, now: float) -> None:
        num_steps, num_decodes = launch.num_steps, len(self._decoding)
        self.num_steps += num_steps
        self.num_tokens += num_decodes * num_steps + sum(chunk.num_tokens for chunk in launch.chunks)
        self.busy_seconds += launch.seconds(num_steps)
        self._step += num_steps
        self._kv_tokens += num_decodes * num_steps
        while self._decoding and self._decoding[0][0] <= self._step:
            request = heapq.heappop(self._decoding)[2]
            self._kv_tokens -= request.num_tokens - 1  # the last token is not cached
            self._finish(request, now)
        for request, count in launch.chunks:
            request.num_left -= count
            if not request.num_left:
                self._begin_decode(request, now)

    def _begin_decode(self, request: CoarseRequest, now: float) -> None:
        self._prefilling.remove(request)
        request.first_token_time = now
        self._started(self.number, request)
        last = self._step + len(request.output_token_ids) - 1
        if last == self._step:
            self._finish(request, now)
        else:
            self._kv_tokens += request.num_prompt_tokens
            heapq.heappush(self._decoding, (last, int(request.request_id), request))

    def _finish(self, request: CoarseRequest, now: float) -> None:
        request.last_token_time = now
        request.finish_reason = FinishReason.STOP
        self._reserved -= request.num_tokens
        self._ended(self.number, request)
