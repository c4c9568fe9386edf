import heapq
import math
from collections import deque
from collections.abc import Callable

import numpy as np

from tidewheel.batch import Int32Array, Int64Array, RowArray, SampledTokens, ScheduledBatch
from tidewheel.errors import InternalError, TidewheelError
from tidewheel.fleet.router import RoutedRequest, Router
from tidewheel.fleet.routers import ROUTERS
from tidewheel.fleet.scaling import ReplicaReport
from tidewheel.record.recorded_events import ORDINARY_TOKEN, STOP_TOKEN, step_features
from tidewheel.request import Priority, Request
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.simulate.coarse_replica import CoarseLimits, CoarseReplica
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.drafts import SimulatedDrafts
from tidewheel.simulate.fleet import ScalingPlan, SimulatedFleet, SimulatedReplica
from tidewheel.simulate.lora_loader import LoraLoader
from tidewheel.simulate.outcomes import Figures, SimulatedRequest, SimulationOutcomes, Told, summarise
from tidewheel.simulate.trace_requests import TraceRequests
from tidewheel.stats import EngineStats
from tidewheel.workload.traces import Trace

IDLE_POLL_S = 1e-3  # between looks of an engine that could start nothing
MOST_WAIT_S = 86_400.0  # for a first replica, after the last arrival

MakeScheduler = Callable[[int], Scheduler]


class EngineReplica:
    """Simulated engine: the loop of `EngineCore.step` on a cost model.

    A turn applies the finished batch as of its end, then schedules the next; requests are added before each.
    """

    def __init__(
        self,
        number: int,
        scheduler: Scheduler,
        cost: CostModel,
        requests: TraceRequests,
        started: Told,
        ended: Told,
        *,
        num_rows: int,
        block_size: int = 1,
        has_tokens: bool = False,
        has_deadlines: bool = False,
        has_free_drafts: bool = False,
        lora_load_s: float = 0.0,
    ) -> None:
        self.number = number
        self.num_steps = 0
        self.num_tokens = 0
        self.busy_seconds = 0.0
        self.scheduler = scheduler
        self._cost = cost
        self._loras = LoraLoader(scheduler.loras, lora_load_s)
        self._started = started
        self._ended = ended
        self._has_deadlines = has_deadlines
        self._block_size = block_size
        self._requests = requests
        self._pool = requests.pool if has_tokens else None  # None: equal tokens
        self._is_idle = True
        self._reported = (0.0, 0)  # time and tokens of the last report
        self._inbox: deque[tuple[float, Request, int, int]] = deque()
        self._lasts: dict[str, tuple[int, int]] = {}  # last position and offset by id, before a row
        self._last_positions = np.zeros(num_rows, dtype=np.int64)  # by row
        self._offsets = np.zeros(num_rows, dtype=np.int64)  # in the pool, by row
        self._in_flight: deque[tuple[ScheduledBatch, float]] = deque()  # batch, end
        self._device_free = 0.0
        self._completes = False  # the turn begins with the oldest batch's end
        if most := scheduler.max_drafts:
            assert cost.draft_acceptance is not None
            drafts = SimulatedDrafts(
                num_rows, most, cost.draft_acceptance, self._tokens_at, is_free=has_free_drafts, seed=number
            )
            scheduler.use_proposer(drafts)

    def submit(self, now: float, index: int) -> float | None:
        """Queue the request of a trace index. The scheduler does not know its output length."""
        request = self._requests.request(index, now)
        request.lora = self._loras.lora(self._requests.trace.lora(index))
        last_position = request.num_prompt_tokens + int(self._requests.trace.output_tokens[index]) - 1
        self._inbox.append((now, request, last_position, self._requests.contents.offset(index)))
        if not self._is_idle:
            return None
        self._is_idle = False
        return now

    def report(self, now: float) -> ReplicaReport:
        (before, tokens), self._reported = self._reported, (now, self.num_tokens)
        return ReplicaReport(
            name=str(self.number),
            waiting=self.scheduler.num_waiting + len(self._inbox),
            running=self.scheduler.num_running,
            cache_usage=_cache_usage(self.scheduler.stats()),
            tokens_per_s=(self.num_tokens - tokens) / max(now - before, 1e-9),
            queue_s=dict(zip(Priority, self.scheduler.oldest_waits(now), strict=True)),
        )

    def turn(self, now: float) -> float | None:
        """Apply and schedule a step. Return the next turn's time; None: wait for an arrival."""
        if self._completes:
            batch, end = self._in_flight.popleft()
            self._receive(end)
            self._apply(batch, end)
        self._receive(now)
        if self._has_deadlines:
            for request in self.scheduler.expire(now):
                self._end(request)
        self._loras.advance()
        scheduled = self.scheduler.schedule(now)
        if scheduled is not None:
            self._launch(scheduled, now)
        next_turn = self._next_turn(now, is_full=scheduled is None)
        self._is_idle = next_turn is None
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
                evicted = self.scheduler.add_group([request], now)
            except TidewheelError as error:
                request.error = error
                self._ended(self.number, request)
                continue
            self._lasts[request.request_id] = (last_position, offset)
            for waiter in evicted:
                self._end(waiter)

    def _launch(self, batch: ScheduledBatch, now: float) -> None:
        for new in batch.new_rows:
            self._last_positions[new.row], self._offsets[new.row] = self._lasts[new.request.request_id]
        seconds = self._cost.step_seconds(step_features(batch), batch.weights)
        if len(batch.draft_tokens):
            seconds += self._cost.seconds_per_draft * (int(np.bincount(batch.rows).max()) - 1)
        moves = batch.transfers
        if num_swapped := len(moves.swap_in_blocks) + len(moves.swap_out_blocks):
            seconds += self._cost.swap_seconds(num_swapped, self._block_size)
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
        tokens = self._tokens_at(batch.rows, batch.start_positions + batch.num_scheduled_tokens)
        if batch.num_decodes < len(batch.rows):
            tokens[~batch.samples] = SampledTokens.NOT_SAMPLED
        return tokens

    def _tokens_at(self, rows: RowArray | Int32Array, positions: Int32Array | Int64Array) -> Int32Array:
        """Return the tokens of a request's row by position, of equal shapes; stops from the last one on."""
        last_positions = self._last_positions.take(rows)
        if self._pool is None:
            tokens = np.full(positions.shape, ORDINARY_TOKEN, dtype=np.int32)
        else:
            tokens = self._pool.take(self._offsets.take(rows) + np.minimum(positions, last_positions))
        tokens[positions >= last_positions] = STOP_TOKEN
        return tokens

    def _end(self, request: Request) -> None:
        self._lasts.pop(request.request_id, None)
        tool = self._requests.trace.tool(int(request.request_id))
        if tool and request.last_token_time is not None:
            self.scheduler.pause_session(request.tenant, request.session_id, (tool,), request.last_token_time)
        self._ended(self.number, request)


def _cache_usage(stats: EngineStats) -> float:
    return 1 - stats.num_free_blocks / stats.num_blocks


class Simulator:
    def __init__(
        self,
        trace: Trace,
        make_scheduler: MakeScheduler,
        cost: CostModel,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int = 1,
        enable_prefix_caching: bool = True,
        session_ttl_s: float = 300.0,
        num_replicas: int = 1,
        router: str | Router[int] = "round-robin",
        max_tokens: int | None = None,
        scaling: ScalingPlan | None = None,
        coarse: CoarseLimits | None = None,
        has_free_drafts: bool = False,
        lora_load_s: float = 0.0,
    ) -> None:
        """Give every request `max_tokens` (None: the trace's longest output). Start with `num_replicas`."""
        self._trace = trace
        self._requests = TraceRequests(
            trace,
            max_model_len=max_model_len,
            session_ttl_s=session_ttl_s,
            max_tokens=max_tokens,
            has_contents=coarse is None,
        )
        self._router: Router[int] = ROUTERS[router]() if isinstance(router, str) else router
        self._routed: dict[int, RoutedRequest[int]] = {}  # by request
        self._turns: list[tuple[float, int]] = []  # heap of (time, replica), with stale entries
        self._next_turns: dict[int, float] = {}  # by replica
        self.now = 0.0
        self._held: deque[int] = deque()  # arrived while no replica was ready
        self._next_turns_of_sessions = trace.next_turns()
        self._pausing: list[tuple[float, int]] = []  # heap of (arrival, request) after a pause
        self.outcomes = SimulationOutcomes(trace)

        def make_replica(number: int) -> SimulatedReplica:
            if coarse is not None:
                return CoarseReplica(number, coarse, cost, self._requests, self._started, self._ended)
            return EngineReplica(
                number,
                make_scheduler(number),
                cost,
                self._requests,
                self._started,
                self._ended,
                num_rows=num_rows,
                block_size=block_size,
                has_tokens=enable_prefix_caching,
                has_deadlines=bool(np.isfinite((trace.deadlines, trace.ttft_objectives)).any()),
                has_free_drafts=has_free_drafts,
                lora_load_s=lora_load_s,
            )

        self.fleet = SimulatedFleet(make_replica, self._router, num_replicas, scaling)

    @property
    def replicas(self) -> list[SimulatedReplica]:
        return self.fleet.replicas

    def run(self) -> SimulationOutcomes:
        follows = np.isfinite(self._trace.pauses).tolist()
        for index, arrival in enumerate(self._trace.arrivals.tolist()):
            if not follows[index]:
                self._advance(arrival, index)
                self._arrive(index, arrival)
        self._finish()
        self.outcomes.check_complete()
        return self.outcomes

    def summary(self) -> Figures:
        steps = sum(replica.num_steps for replica in self.replicas)
        end = max(self.now, float(self._trace.arrivals[-1]))
        stays = [max(min(stay.end, end) - stay.begin, 1e-12) for stay in self.fleet.stays]
        busy = [replica.busy_seconds / stay for replica, stay in zip(self.replicas, stays, strict=True)] or [0.0]
        replicas = {
            "count": len(self.replicas),
            "steps": steps,
            "tokens_per_step": sum(replica.num_tokens for replica in self.replicas) / max(steps, 1),
            "busy_mean": float(np.mean(busy)),
            "busy_max": float(np.max(busy)),
            "hours": self.fleet.replica_seconds(end) / 3600,
            "most": max((count for _, count in self.fleet.changes), default=0),
        }
        return {**summarise(self.outcomes), "replicas": replicas, "drafts": self._drafts()}

    def _drafts(self) -> Figures:
        stats = [replica.scheduler.stats() for replica in self.replicas if isinstance(replica, EngineReplica)]
        accepted = sum(one.num_accepted_draft_tokens for one in stats)
        return {
            "accepted_share": accepted / max(sum(one.num_draft_tokens for one in stats), 1),
            "accepted_per_step": accepted / max(sum(one.num_drafts for one in stats), 1),  # of a request with drafts
        }

    def _advance(self, until: float, num_arrivals: int) -> None:
        while (event := self.fleet.next_event) <= until and event < math.inf:
            self._run_turns(event)
            self.now = event
            self.fleet.event(event, num_arrivals, len(self._held))
            while self._held and self.fleet.has_ready:
                self._send(self._held.popleft(), event)
        self._run_turns(until)

    def _finish(self) -> None:
        count, last = len(self._trace), float(self._trace.arrivals[-1])
        while self._routed or self._held or self._pausing:
            until = self.fleet.next_event
            if self._held and until > last + MOST_WAIT_S:
                raise InternalError(f"{len(self._held)} requests wait for a replica, and none comes")
            self._advance(until, count)

    def _run_turns(self, until: float) -> None:
        turns, pausing = self._turns, self._pausing
        while (turns and turns[0][0] <= until) or (pausing and pausing[0][0] <= until):
            if pausing and not (turns and turns[0][0] < pausing[0][0]):
                now, index = heapq.heappop(pausing)
                self._arrive(index, now)
                continue
            now, number = turns[0]
            if self._next_turns.get(number) != now:  # stale
                heapq.heappop(turns)
                continue
            self.now = now
            next_turn = self.replicas[number].turn(now)
            if next_turn is None:
                del self._next_turns[number]
                heapq.heappop(turns)
            else:
                self._next_turns[number] = next_turn
                heapq.heapreplace(turns, (next_turn, number))

    def _arrive(self, index: int, now: float) -> None:
        self.now = self.outcomes.arrivals[index] = now
        if self.fleet.has_ready:
            self._send(index, now)
        else:
            self._held.append(index)

    def _send(self, index: int, now: float) -> None:
        route = self._requests.route(index)
        number = self._router.choose(route)
        if number is None:
            raise InternalError(f"request {index} found no replica")
        self._routed[index] = self._router.chosen(route, number)
        self.fleet.sent(number)
        next_turn = self.replicas[number].submit(now, index)
        if next_turn is not None:
            self._next_turns[number] = next_turn
            heapq.heappush(self._turns, (next_turn, number))

    def _started(self, _: int, request: SimulatedRequest) -> None:
        self._router.started(self._routed[int(request.request_id)], request.num_cached_tokens)

    def _ended(self, number: int, request: SimulatedRequest) -> None:
        index = int(request.request_id)
        self.outcomes.record(index, number, request)
        self._router.ended(self._routed.pop(index))
        self.fleet.ended(number, self.now)
        next_turn = self._next_turns_of_sessions.get(index)
        if next_turn is not None:
            ended = self.now if request.last_token_time is None else request.last_token_time
            arrival = max(self.now, ended + float(self._trace.pauses[next_turn]))
            heapq.heappush(self._pausing, (arrival, next_turn))
