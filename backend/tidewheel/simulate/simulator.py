"""Discrete-event simulation of replicas behind a router; no step is skipped or merged."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

from tidewheel.fleet.router import RouteKey, make_router
from tidewheel.record.recorded_events import STOP_TOKEN
from tidewheel.request import Priority, Request
from tidewheel.sampling import SamplingParams
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.outcomes import Outcomes
from tidewheel.simulate.replica import Replica
from tidewheel.workload.traces import Contents, Trace

MakeScheduler = Callable[[int], Scheduler]  # takes the replica's number

_SAMPLING = SamplingParams()


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
        self._router = make_router(router, num_replicas)
        self._max_tokens = max_tokens or int(trace.output_tokens.max())
        self._contents = Contents(trace)
        self._loads = [0] * num_replicas
        self.outcomes = Outcomes(trace)
        self.replicas = [
            Replica(
                number,
                make_scheduler(number),
                cost,
                self._ended,
                num_rows=num_rows,
                pool=self._contents.pool if enable_prefix_caching else None,
                has_deadlines=bool(np.isfinite(trace.deadlines).any()),
            )
            for number in range(num_replicas)
        ]

    def run(self) -> Outcomes:
        turns: list[tuple[float, int]] = []  # heap of (time, replica)
        for index, arrival in enumerate(self._trace.arrivals.tolist()):
            self._advance(turns, arrival)
            self._arrive(turns, index, arrival)
        self._advance(turns, math.inf)
        self.outcomes.check_complete()
        return self.outcomes

    def _advance(self, turns: list[tuple[float, int]], until: float) -> None:
        while turns and turns[0][0] <= until:
            now, number = turns[0]
            next_turn = self.replicas[number].turn(now)
            if next_turn is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (next_turn, number))

    def _arrive(self, turns: list[tuple[float, int]], index: int, now: float) -> None:
        trace = self._trace
        number = self._router.choose(RouteKey(trace.session(index), trace.prefix_group(index)), self._loads)
        replica = self.replicas[number]
        replica.submit(now, self._request(index, now), int(trace.output_tokens[index]), self._contents.offset(index))
        self._loads[number] += 1
        if replica.is_idle:
            replica.is_idle = False
            heapq.heappush(turns, (now, number))

    def _ended(self, number: int, request: Request) -> None:
        self._loads[number] -= 1
        self.outcomes.record(int(request.request_id), number, request)

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
