"""Where every unfinished request is, and its moves from one place to another."""

from __future__ import annotations

from tidewheel.kvcache.hits import PrefixHit
from tidewheel.kvcache.invariants import require
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import FinishReason, Priority, Request, RequestState
from tidewheel.scheduler.columns import Columns
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.events import Event, EventHeap
from tidewheel.scheduler.fairness import VirtualCounters
from tidewheel.scheduler.policy import POLICIES, Rank, rank
from tidewheel.scheduler.preemption_cost import PreemptionCost
from tidewheel.scheduler.queue import WaitingSet
from tidewheel.scheduler.stats import Counters
from tidewheel.tenants import TenantLimits


class State:
    """Waiting set, running set and block tables; they change together, here and nowhere else.

        wait          → WAITING
        enter         WAITING, PREEMPTED → RUNNING
        preempt       RUNNING → PREEMPTED
        end           any → FINISHED

    Whoever leaves a row while a batch in flight names it leaves two things behind: its blocks, which are held until
    that batch is applied, and a result that nobody wants, told by the row's epoch.
    """

    def __init__(self, kv: KVCacheManager, config: SchedulerConfig, preemption_cost: PreemptionCost) -> None:
        self.kv = kv
        self.preemption_cost = preemption_cost
        self.config = config
        self.policy = POLICIES[config.policy]
        self.virtual_counters = (
            VirtualCounters(lambda tenant: config.limits_of(tenant).weight) if self.policy.by_tenant else None
        )
        self.waiting = WaitingSet(self.policy, self.virtual_counters)
        self.columns = Columns(config.num_rows)
        self.requests: dict[str, Request] = {}  # unfinished, in order of arrival
        self.counters = Counters()
        self.last_applied = -1  # newest step that is not in flight any more
        self.deadlines = EventHeap(_is_unfinished)
        self.soft_deadlines = EventHeap(_is_unfinished)
        self.lifts = EventHeap(self._is_due_to_be_lifted)
        self.over_quota: set[str] = set()  # ids of requests that were dropped for it
        self._next_lifts: dict[str, float] = {}  # by id of waiting requests
        self._leaders: dict[str, Request] = {}  # that run while others are parked behind them
        self._num_added = 0

    def limits_of(self, tenant: str) -> TenantLimits:
        return self.config.limits_of(tenant)

    def num_blocks_of(self, tenant: str) -> int:
        """In the block tables of its running requests and in its sessions; a block in two of them counts twice."""
        return self.columns.num_slots_of(tenant) // self.kv.block_size + self.kv.session_blocks(tenant)

    def wait(self, request: Request) -> None:
        """The request begins to wait, behind its leader if it has one."""
        self.requests[request.request_id] = request
        if request.leader is None:
            self.waiting.push(request, self._num_added)
        else:
            self.waiting.park(request, self._num_added, request.leader)
        self._num_added += 1
        self._schedule_lift(request, since=request.arrival_time)
        if request.deadline is not None:
            self.deadlines.push(request.deadline, request, len(self.requests))
        if request.soft_deadline is not None:
            self.soft_deadlines.push(request.soft_deadline, request, len(self.requests))

    def reclassify(self, request: Request, service_class: Priority, *, since: float) -> None:
        """The request is served in another class; if it waits, it has waited in this one `since` then."""
        if request.state is RequestState.RUNNING:
            request.service_class = service_class
            self.columns.reclassify(request, *self._class_and_rank(request))
        else:
            self.waiting.reclassify(request, service_class)
            self._schedule_lift(request, since=since)

    def find_hit(self, request: Request) -> PrefixHit:
        """What is there already: of the cache, or of the row of its leader."""
        hit = self.kv.find_prefix(request)
        leader = request.leader
        if leader is None or leader.state is not RequestState.RUNNING or request.output_token_ids:
            return hit
        if self.columns.num_computed_tokens[leader.row] < leader.num_prompt_tokens - 1:
            return hit
        fork = self.kv.fork_hit(leader.row, request)
        return fork if fork.num_tokens > hit.num_tokens else hit

    def set_overdue(self, request: Request) -> None:
        """The request has waited so long in the best class that it may reach that it goes by arrival from now on."""
        self._next_lifts.pop(request.request_id)
        self.waiting.reclassify(request, request.service_class, is_overdue=True)

    def enter(self, request: Request, hit: PrefixHit, *, keep_free: int) -> list[int] | None:
        """The request takes a free row and blocks for all its tokens; its block table. None if blocks are short."""
        kv, columns = self.kv, self.columns
        row = columns.next_free_row()
        if not kv.allocate(row, request.num_tokens, hit, keep_free=keep_free):
            return None
        blocks = kv.block_table(row)
        columns.enter(
            request,
            self.waiting.remove(request),
            service_class=self._class_that_counts(request),
            num_cached_tokens=hit.num_tokens,
            num_slots=len(blocks) * kv.block_size,
        )
        self._next_lifts.pop(request.request_id, None)
        if self.waiting.has_parked(request):
            self._leaders[request.request_id] = request
        request.state = RequestState.RUNNING
        request.num_reused_blocks += len(hit.block_ids)
        request.num_new_blocks += len(blocks) - len(hit.block_ids)
        return list(blocks)

    def preempt(self, row: int, now: float) -> None:
        """Back to the waiting set, to be computed again: its output is kept, its blocks are not."""
        request = self.columns.request(row)
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        num_computed_tokens = int(self.columns.num_computed_tokens[row])
        if self._should_swap(num_computed_tokens) and self.kv.offload(row, request, num_computed_tokens):
            self.counters.num_swap_preemptions += 1
        self.waiting.push(request, int(self._leave(row)[-1]))
        self._schedule_lift(request, since=now)

    def end(self, request: Request, reason: FinishReason, now: float, *, keep_cached: bool = True) -> None:
        """The one place where a request ends. Without `keep_cached`, nothing that it computed is used again."""
        if request.state is RequestState.RUNNING:
            if request.session_id and keep_cached and reason is not FinishReason.ERROR:
                row = request.row
                self.kv.keep_session(row, request, int(self.columns.num_computed_tokens[row]), now)
            self._leave(request.row, keep_cached=keep_cached)
        else:
            self.waiting.remove(request)
            self._next_lifts.pop(request.request_id, None)
            if request.leader is not None and not self.waiting.has_parked(request.leader):
                self._leaders.pop(request.leader.request_id, None)
        self.waiting.release(request)
        del self.requests[request.request_id]
        self.over_quota.discard(request.request_id)
        request.state = RequestState.FINISHED
        request.finish_reason = reason

    def release_parked(self) -> None:
        """Lets requests into the queue whose leader has computed the prompt that they share, but for its last token.

        Each of them computes that one for itself: it is what its first token is sampled from.
        """
        ready = [
            leader
            for leader in self._leaders.values()
            if self.columns.num_computed_tokens[leader.row] >= leader.num_prompt_tokens - 1
        ]
        for leader in ready:
            del self._leaders[leader.request_id]
            self.waiting.release(leader)

    def _should_swap(self, num_computed_tokens: int) -> bool:
        if not self.kv.num_host_blocks or self.config.preemption_mode == "recompute":
            return False
        num_blocks = num_computed_tokens // self.kv.block_size
        return self.config.preemption_mode == "swap" or self.preemption_cost.should_swap(
            num_computed_tokens, num_blocks
        )

    def _leave(self, row: int, *, keep_cached: bool = True) -> Rank:
        """Row and blocks are given back, the blocks when no batch in flight names them any more; the rank."""
        columns = self.columns
        request = columns.request(row)
        self._leaders.pop(request.request_id, None)
        if keep_cached:
            self.kv.commit(row, request, int(columns.num_computed_tokens[row]))
        else:
            self.kv.forget(row)
        last_step = int(columns.last_step[row])
        self.kv.free(row, after_step=last_step if last_step > self.last_applied else None)
        return columns.leave(row)

    def _class_that_counts(self, request: Request) -> int:
        return request.service_class if self.policy.by_class else 0

    def _class_and_rank(self, request: Request) -> tuple[int, Rank]:
        sequence = int(self.columns.sequences[request.row])
        return self._class_that_counts(request), rank(self.policy, request, sequence)

    def _schedule_lift(self, request: Request, *, since: float) -> None:
        if request.service_class <= Priority.HIGH and self.policy.by_arrival:
            self._next_lifts.pop(request.request_id, None)
            return
        time = since + self.config.ageing_s
        self._next_lifts[request.request_id] = time
        self.lifts.push(time, request, len(self.requests))

    def _is_due_to_be_lifted(self, event: Event) -> bool:
        return self._next_lifts.get(event.request.request_id) == event.time

    def check_invariants(self) -> None:
        """Raises `InternalError` naming what is broken. O(blocks + requests)."""
        self.kv.check_invariants()
        self.columns.check_invariants()
        self.waiting.check_invariants()
        waiting = list(self.waiting)
        states = {request.state for request in waiting}
        require(states <= {RequestState.WAITING, RequestState.PREEMPTED}, f"waiting requests are {states}")
        running = self.columns.requests(self.columns.running.nonzero()[0])
        placed = {request.request_id: request for request in (*waiting, *running)}
        require(len(placed) == len(waiting) + len(running), "a request is in two places")
        require(placed == self.requests, "requests are lost or left over")
        self._check_events(waiting)
        for request in running:
            num_slots = len(self.kv.block_table(request.row)) * self.kv.block_size
            require(int(self.columns.num_slots[request.row]) == num_slots, f"{request} has {num_slots} slots")
            require(
                int(self.columns.classes[request.row]) == self._class_that_counts(request),
                f"{request} runs in another class",
            )

    def _check_events(self, waiting: list[Request]) -> None:
        due = {request.request_id for request in waiting if request.service_class > Priority.HIGH}
        require(due <= self._next_lifts.keys(), "somebody waits to be lifted for ever")
        places = {request.request_id for request in waiting}
        require(self._next_lifts.keys() <= places, "lifts of requests that do not wait are left over")
        require(self.over_quota <= self.requests.keys(), "quota marks of ended requests are left over")
        require(self._leaders.keys() <= self.requests.keys(), "leaders that ended are left over")
        for leader in self._leaders.values():
            is_leading = leader.state is RequestState.RUNNING and self.waiting.has_parked(leader)
            require(is_leading, f"{leader} leads nobody")


def _is_unfinished(event: Event) -> bool:
    return not event.request.is_finished
