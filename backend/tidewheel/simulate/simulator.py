"""Discrete-event simulation of replicas behind a router; no step is skipped or merged."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

import numpy as np

from tidewheel.batch import Int32Array, SampledTokens, ScheduledBatch
from tidewheel.errors import InternalError, TidewheelError
from tidewheel.fleet.chunk_hashes import chunk_hashes
from tidewheel.fleet.named_routers import make_router
from tidewheel.fleet.router import Flight, Router, RouteRequest
from tidewheel.record.recorded_events import STOP_TOKEN, step_features
from tidewheel.request import Priority, Request
from tidewheel.sampling import SamplingParams
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.outcomes import Figures, Outcomes, summarise
from tidewheel.workload.traces import Contents, Trace

CHUNK_TOKENS = 256  # of a prompt, whose hash the router gets
IDLE_POLL_S = 1e-3  # between looks of an engine that could start nothing
_SAMPLING = SamplingParams()

MakeScheduler = Callable[[int], Scheduler]  # takes the replica's number
Told = Callable[[int, Request], None]  # (replica number, request)


class Replica:
    """One engine: the loop of `EngineCore.step` with a cost model as its device.

    A turn applies the finished batch as of its end, then schedules the next. Requests that arrived by either moment
    are added then.
    """

    def __init__(
        self,
        number: int,
        scheduler: Scheduler,
        cost: CostModel,
        started: Told,
        ended: Told,
        *,
        num_rows: int,
        pool: Int32Array | None = None,
        has_deadlines: bool = False,
    ) -> None:
        self.number = number
        self.is_idle = True
        self.num_steps = 0
        self.num_tokens = 0
        self.busy_seconds = 0.0
        self.scheduler = scheduler
        self._cost = cost
        self._started = started
        self._ended = ended
        self._has_deadlines = has_deadlines
        self._pool = pool  # None: all tokens are alike
        self._inbox: deque[tuple[float, Request, int, int]] = deque()
        self._lasts: dict[str, tuple[int, int]] = {}  # id → last position, offset, before a row
        self._last_positions = np.zeros(num_rows, dtype=np.int64)  # row → position of the last token
        self._offsets = np.zeros(num_rows, dtype=np.int64)  # row → offset in the pool
        self._ordinary = np.ones(num_rows, dtype=np.int32)
        self._in_flight: deque[tuple[ScheduledBatch, float]] = deque()  # batch, end
        self._device_free = 0.0
        self._completes = False  # this turn begins with the oldest batch's end

    def submit(self, now: float, request: Request, num_output_tokens: int, offset: int) -> None:
        """Queue a request that stops after `num_output_tokens`, unknown to the scheduler."""
        self._inbox.append((now, request, request.num_prompt_tokens + num_output_tokens - 1, offset))

    def turn(self, now: float) -> float | None:
        """Return the time of the next turn; None: wait for an arrival."""
        if self._completes:
            batch, end = self._in_flight.popleft()
            self._receive(end)
            self._apply(batch, end)
        self._receive(now)
        if self._has_deadlines:
            for request in self.scheduler.expire(now):
                self._end(request)
        scheduled = self.scheduler.schedule(now)
        if scheduled is not None:
            self._launch(scheduled, now)
        next_turn = self._next_turn(now, is_full=scheduled is None)
        self.is_idle = next_turn is None
        return next_turn

    def _next_turn(self, now: float, *, is_full: bool) -> float | None:
        if not self._in_flight:
            self._completes = False
            return now + IDLE_POLL_S if self.scheduler.has_unfinished else None
        self._completes = is_full or len(self._in_flight) == self.scheduler.max_inflight_steps
        batch, end = self._in_flight[0]
        host_seconds = self._cost.turn_seconds(len(batch.rows))
        return (max(now, end) if self._completes else now) + host_seconds

    def _receive(self, now: float) -> None:
        inbox = self._inbox
        while inbox and inbox[0][0] <= now:
            _, request, last_position, offset = inbox.popleft()
            try:
                evicted = self.scheduler.add(request, now)
            except TidewheelError as error:
                request.error = error
                self._ended(self.number, request)
                continue
            self._lasts[request.request_id] = (last_position, offset)
            for waiter in evicted:
                self._end(waiter)

    def _launch(self, batch: ScheduledBatch, now: float) -> None:
        for new in batch.new_rows:
            self._last_positions[new.row], self._offsets[new.row] = self._lasts[new.request_id]
        seconds = self._cost.step_seconds(step_features(batch))
        self._device_free = max(now, self._device_free) + seconds
        self._in_flight.append((batch, self._device_free))
        self.busy_seconds += seconds
        self.num_steps += 1
        self.num_tokens += batch.num_tokens

    def _apply(self, batch: ScheduledBatch, end: float) -> None:
        outputs = self.scheduler.apply(batch, SampledTokens(batch.step_id, self._tokens(batch)), end)
        if batch.num_decodes < len(batch.rows):
            for request in outputs.requests:
                if request.first_token_time == end:
                    self._started(self.number, request)
        for request in outputs.finished:
            self._end(request)

    def _tokens(self, batch: ScheduledBatch) -> Int32Array:
        rows = batch.rows
        positions = batch.start_positions + batch.num_scheduled_tokens
        if self._pool is None:
            tokens = self._ordinary[: len(rows)].copy()
        else:
            tokens = self._pool.take(self._offsets.take(rows) + positions)
        tokens[positions == self._last_positions.take(rows)] = STOP_TOKEN
        if batch.num_decodes < len(rows):
            tokens[~batch.samples] = SampledTokens.NOT_SAMPLED
        return tokens

    def _end(self, request: Request) -> None:
        self._lasts.pop(request.request_id, None)
        self._ended(self.number, request)


class Simulator:
    """One simulation; `run` may be called once."""

    def __init__(
        self,
        trace: Trace,
        make_scheduler: MakeScheduler,
        cost: CostModel,
        *,
        num_rows: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        session_ttl_s: float = 300.0,
        num_replicas: int = 1,
        router: str = "round-robin",
        max_tokens: int | None = None,
    ) -> None:
        """Set `max_tokens` of every request; None: the trace's longest output."""
        self._trace = trace
        self._max_model_len = max_model_len
        self._session_ttl_s = session_ttl_s
        self._router: Router[int] = make_router(router)
        self._flights: dict[int, Flight[int]] = {}  # by request
        self._max_tokens = max_tokens or int(trace.output_tokens.max())
        self._contents = Contents(trace)
        self.outcomes = Outcomes(trace)
        self.replicas = [
            Replica(
                number,
                make_scheduler(number),
                cost,
                self._started,
                self._ended,
                num_rows=num_rows,
                pool=self._contents.pool if enable_prefix_caching else None,
                has_deadlines=bool(np.isfinite(trace.deadlines).any()),
            )
            for number in range(num_replicas)
        ]
        for replica in self.replicas:
            self._router.join(replica.number)

    def run(self) -> Outcomes:
        turns: list[tuple[float, int]] = []  # heap of (time, replica)
        for index, arrival in enumerate(self._trace.arrivals.tolist()):
            self._advance(turns, arrival)
            self._arrive(turns, index, arrival)
        self._advance(turns, math.inf)
        self.outcomes.check_complete()
        return self.outcomes

    def summary(self) -> Figures:
        steps = sum(replica.num_steps for replica in self.replicas)
        busy = [replica.busy_seconds / max(self.outcomes.span, 1e-12) for replica in self.replicas]
        replicas = {
            "count": len(self.replicas),
            "steps": steps,
            "tokens_per_step": sum(replica.num_tokens for replica in self.replicas) / max(steps, 1),
            "busy_mean": float(np.mean(busy)),
            "busy_max": float(np.max(busy)),
        }
        return {**summarise(self.outcomes), "replicas": replicas}

    def _advance(self, turns: list[tuple[float, int]], until: float) -> None:
        while turns and turns[0][0] <= until:
            now, number = turns[0]
            next_turn = self.replicas[number].turn(now)
            if next_turn is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (next_turn, number))

    def _arrive(self, turns: list[tuple[float, int]], index: int, now: float) -> None:
        route = self._route_request(index)
        number = self._router.choose(route)
        if number is None:
            raise InternalError(f"request {index} found no replica")
        self._flights[index] = self._router.chosen(route, number)
        replica = self.replicas[number]
        output_tokens = int(self._trace.output_tokens[index])
        replica.submit(now, self._request(index, now), output_tokens, self._contents.offset(index))
        if replica.is_idle:
            replica.is_idle = False
            heapq.heappush(turns, (now, number))

    def _started(self, _: int, request: Request) -> None:
        self._router.started(self._flights[int(request.request_id)], request.num_cached_tokens)

    def _ended(self, number: int, request: Request) -> None:
        index = int(request.request_id)
        self.outcomes.record(index, number, request)
        self._router.ended(self._flights.pop(index))

    def _route_request(self, index: int) -> RouteRequest:
        trace, tenant = self._trace, self._trace.tenant(index)
        prompt = self._contents.prompt(index)
        return RouteRequest(
            session=trace.session(index),
            tenant=tenant,
            priority=Priority(int(trace.priorities[index])),
            num_tokens=len(prompt),
            chunks=chunk_hashes(prompt.tobytes(), CHUNK_TOKENS * prompt.itemsize, tenant),
            chunk_tokens=CHUNK_TOKENS,
        )

    def _request(self, index: int, now: float) -> Request:
        trace = self._trace
        prompt = self._contents.prompt(index)
        deadline = now + float(trace.deadlines[index])
        return Request(
            str(index),
            prompt,
            _SAMPLING,
            max_tokens=min(self._max_tokens, max(self._max_model_len - len(prompt), 1)),
            arrival_time=now,
            priority=Priority(int(trace.priorities[index])),
            stop_token_ids=(STOP_TOKEN,),
            tenant=trace.tenant(index),
            deadline=deadline if deadline < math.inf else None,
            session_id=trace.session(index),
            session_ttl=self._session_ttl_s,
        )
