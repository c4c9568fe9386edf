import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tidewheel.batch import RowArray
from tidewheel.event_heap import EventHeap, TimedEvent
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.kvcache.prefix import NO_HIT, PrefixHit
from tidewheel.request import FinishReason, Priority, Request, RequestState
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.config import SchedulerConfig
from tidewheel.scheduler.estimates import OutputPredictor, StepTime
from tidewheel.scheduler.goodput import Goodput
from tidewheel.scheduler.lora_slots import LoraSlots
from tidewheel.scheduler.policy import POLICIES, rank_of
from tidewheel.scheduler.prompt_lookup import PromptLookup
from tidewheel.scheduler.queue import WaitingSet
from tidewheel.scheduler.speculation import GrammarDrafts, Proposer, RunnerDrafts, Speculation
from tidewheel.scheduler.step_plan import InFlightStep, ShapeTurns
from tidewheel.scheduler.tenancy import VirtualCounters
from tidewheel.stats import BlockShortage
from tidewheel.tenants import limits_of


class BlockedRequest(NamedTuple):
    request: Request
    num_own: int
    num_needed: int  # with expected growth of running requests
    num_free: int  # after the plan


class SchedulerState:
    """Waiting set, rows and block tables, changed together and only here.

        wait          → WAITING
        enter         WAITING, PREEMPTED → RUNNING
        preempt       RUNNING → PREEMPTED
        end           any → FINISHED

    Followers wait with their leader, outside the waiting set, until it has computed their prompt.

    Ageing lifts the class of waiting requests and of prompts under way, up to HIGH. A request that ages further is
    *overdue*, first of its class, if the policy does not order a class by arrival. A request drops a class at its
    soft deadline, and once if it exceeds its tenant's block quota.
    """

    def __init__(self, kv: KVCacheManager, config: SchedulerConfig) -> None:
        self.kv = kv
        self.stats = kv.stats
        self.step_time = StepTime()
        self.predictor = OutputPredictor(config.predictor_prior_tokens)
        self.turns = ShapeTurns() if config.takes_turns else None
        self.columns = RowColumns(config.num_rows)
        self.loras = LoraSlots(config.max_loras, self.columns, self.stats)
        self.speculation: Speculation | None = None
        self.requests: dict[str, Request] = {}  # unfinished, by arrival
        self.deadlines = EventHeap[Request](lambda event: not event.subject.is_finished)
        self._soft_deadlines = EventHeap[Request](lambda event: not event.subject.is_finished)
        self.latest_starts = EventHeap[Request](_awaits_objective)  # that meet the objective of the first token
        self.virtual_counters: VirtualCounters | None = None
        self.observe_end: Callable[[Request, float], None] = lambda _, __: None  # set by admission
        self.blocked: BlockedRequest | None = None
        self.in_flight: deque[InFlightStep] = deque()
        self.has_waited = False  # the next step, for tokens that drafts may follow
        self.turned_away = 0, 0  # unfinished requests and running rows when no request could join a step
        self.leaders: dict[str, Request] = {}  # running, with followers
        self._num_added = 0
        self._configure(config)
        if config.speculation != "none":
            most = config.num_speculative_tokens
            is_lookup = config.speculation == "prompt_lookup"
            lookup = PromptLookup(config.num_rows, config.max_model_len, most) if is_lookup else RunnerDrafts(most)
            self.use_proposer(GrammarDrafts(lookup, self.columns))

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - self.columns.num_running

    def use_proposer(self, proposer: Proposer, goodput: Goodput | None = None) -> None:
        most, step_seconds = self.config.num_speculative_tokens, self.config.decode_seconds
        goodput = goodput or Goodput(self.columns.num_rows, most, step_seconds, explores=not proposer.is_free)
        self.speculation = Speculation(proposer, goodput, most, self.columns, self.stats)

    def _configure(self, config: SchedulerConfig) -> None:
        self.config, self.policy = config, POLICIES[config.policy]
        if self.policy.by_tenant != (self.virtual_counters is not None):
            counters = VirtualCounters(lambda tenant: limits_of(self.config.tenants, tenant).weight)
            self.virtual_counters = counters if self.policy.by_tenant else None
        self.waiting = WaitingSet(self.policy, self.virtual_counters, config.tenants)
        self._lifts = EventHeap[Request](lambda event: event.subject.ages_since == event.time)
        self.loras.ageing_s, self.loras.by_class = config.ageing_s, self.policy.by_class

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Rank all requests anew; they keep their age."""
        queued, running = list(self.waiting), self.columns.requests(self.columns.running.nonzero()[0])
        self.predictor.prior = float(config.predictor_prior_tokens)
        self._configure(config)
        for request in queued:
            if self.policy.by_cache and request.is_new:
                request.num_cached_tokens = self.kv.prefixes.estimate(request)
            self.waiting.push(request)
            self._start_ageing(request, request.arrival_time if request.ages_since is None else request.ages_since)
        for request in running:
            self._rank_running(request)
            self._start_ageing(request, request.ages_since)

    def wait(self, group: list[Request]) -> None:
        leader, degrades_critical = group[0], self.config.pressure_quantization_critical
        leader.followers = group[1:]
        for request in group:
            request.sequence = self._num_added
            self._num_added += 1
            request.keeps_full_weights = request.priority is Priority.CRITICAL and not degrades_critical
            self.requests[request.request_id] = request
            self._count_waiting(request, 1)
            if request.deadline is not None:
                self.deadlines.push(request.deadline, request, len(self.requests))
            if request.soft_deadline is not None:
                self._soft_deadlines.push(request.soft_deadline, request, len(self.requests))
            if request.objective is not None and request.latest_start < math.inf:
                self.latest_starts.push(request.latest_start, request, len(self.requests))
        if self.policy.by_cache:
            leader.num_cached_tokens = self.kv.prefixes.estimate(leader)
        self._queue(leader, leader.arrival_time)
        self._start_ageing(leader, leader.arrival_time)

    def _queue(self, request: Request, since: float) -> None:
        self.waiting.push(request)
        if request.lora is not None:
            self.loras.wait(request, request.lora, since)

    def _dequeue(self, request: Request) -> None:
        self.waiting.remove(request)
        if request.lora is not None:
            self.loras.stop_waiting(request, request.lora)

    def _start_ageing(self, request: Request, since: float | None) -> None:
        may_rise = not self.policy.by_arrival or request.service_class > Priority.HIGH
        request.ages_since = since if may_rise else None
        if request.ages_since is not None:
            self._lifts.push(request.ages_since, request, len(self.requests))

    def reclassify(self, request: Request, service_class: Priority, *, since: float | None) -> None:
        """Change a request's class; ageing starts at `since` (None: the request is overdue)."""
        is_overdue = since is None
        if request.state is RequestState.RUNNING:
            request.service_class = service_class
            self._rank_running(request, is_overdue=is_overdue)
        else:
            self.waiting.reclassify(request, service_class, is_overdue=is_overdue)
        for follower in request.followers:
            follower.service_class = service_class
        self._start_ageing(request, since)

    def reclassify_due(self, now: float) -> None:
        for since, _, request in self._lifts.pop_due(now - self.config.ageing_s):
            if request.row >= 0 and not self.columns.is_prefilling(request.row):
                request.ages_since = None
            elif request.service_class <= Priority.HIGH:
                self.reclassify(request, request.service_class, since=None)
            else:
                self.reclassify(request, request.service_class.lifted(), since=since + self.config.ageing_s)
                self.stats.num_aged += 1
        for _, _, request in self._soft_deadlines.pop_due(now):
            follows = request.leader is not None and request in request.leader.followers
            if request.service_class < Priority.LOW and not follows:
                self.reclassify(request, request.service_class.dropped(), since=now)
                self.stats.num_downgraded_deadline += 1

    def demote(self, request: Request, now: float) -> None:
        """Lower the class of a request that waits and would miss its objective, which counts no more."""
        request.is_demoted, request.latest_start = True, math.inf
        if request.leader is None or request not in request.leader.followers:
            self.stats.num_downgraded_objective += request.service_class < Priority.LOW
            self.reclassify(request, request.service_class.dropped(), since=now)

    def is_over_quota(self, request: Request) -> bool:
        """Return whether the request exceeds its tenant's block quota. Shared blocks count for each holder."""
        tenant, kv = request.tenant, self.kv
        limit = limits_of(self.config.tenants, tenant).max_blocks
        if limit is None or request.was_over_quota:
            return False
        num_held = self.columns.num_slots_of(tenant) // kv.block_size + kv.sessions.num_blocks(tenant)
        return num_held + kv.num_blocks_for(request.num_tokens) > limit

    def drop_over_quota(self, request: Request, now: float) -> bool:
        """Lower the class of a request over its tenant's block quota. Return whether lowered."""
        if not self.is_over_quota(request):
            return False
        for member in (request, *request.followers):
            member.was_over_quota = True
        if request.service_class is Priority.LOW:
            return False
        self.stats.num_downgraded_quota += 1
        self.reclassify(request, request.service_class.dropped(), since=now)
        return True

    def _rank_running(self, request: Request, *, is_overdue: bool = False) -> None:
        self.columns.write_back(request.row)
        request.rank = rank_of(self.policy, request, is_overdue=is_overdue)
        self.columns.classes[request.row] = self._class_that_counts(request)

    def shortage(self) -> BlockShortage | None:
        """Return the shortage of the first request in line, or None."""
        blocked, num_free = self.blocked, self.kv.num_free_blocks
        if blocked is None or next(self.waiting.candidates(with_new=True), None) is not blocked.request:
            return None
        num_needed = blocked.num_needed if num_free <= blocked.num_free else blocked.num_own  # others may have ended
        return BlockShortage(num_needed, num_free) if num_free < num_needed else None

    def find_hit(self, request: Request) -> PrefixHit:
        if request.needs_all_states:
            return NO_HIT
        if self.turns is not None:  # the request holds its state
            return PrefixHit((), request.num_output_tokens)
        hit = self.kv.prefixes.find(request)
        leader = request.leader
        if leader is None or leader.state is not RequestState.RUNNING or request.output_token_ids:
            return hit
        has_prompt = self.columns.num_cacheable_tokens(leader.row) >= leader.num_prompt_tokens - 1
        if not has_prompt or leader.has_quantized_hashes != request.has_quantized_hashes:
            return hit
        fork = self.kv.fork_hit(leader.row, request)
        return fork if fork.num_tokens > hit.num_tokens else hit

    def enter(self, request: Request, hit: PrefixHit, *, keep_free: int) -> list[int] | None:
        """Give a waiting request a row; return its block table, or None if blocks are short."""
        kv, columns = self.kv, self.columns
        row = columns.free_rows[0]
        if not kv.allocate(row, request.num_tokens, hit, keep_free=keep_free):
            return None
        kv.prefixes.announce(row, request, hit)
        blocks = kv.block_table(row)
        self._dequeue(request)
        self._count_waiting(request, -1)
        columns.enter(request, hit, len(blocks), kv.block_size, self._class_that_counts(request))
        if request.lora is not None:
            self.loras.enter(request, request.lora)
        if self.speculation is not None:
            self.speculation.enter(request)
        if request.followers:
            self.leaders[request.request_id] = request
        request.state = RequestState.RUNNING
        request.num_reused_blocks += len(hit.block_ids)
        return list(blocks)

    def awaits_tokens(self) -> bool:
        """Note and return whether the next step waits for the tokens of those in flight, as drafts follow them."""
        if self.speculation is None or not self.in_flight:
            return False
        now = len(self.requests), self.columns.num_running
        can_join = self.waiting and self.columns.free_rows and now != self.turned_away
        has_prompt = can_join or len(self.columns.gaps()[2]) > 0  # a step with a prompt has no drafts
        self.has_waited = self.in_flight[-1].has_drafts or (not has_prompt and self.speculation.is_worthwhile())
        return self.has_waited

    def settle_drafts(self, rows: RowArray) -> None:
        """Give back the blocks of rejected drafts after a step; a row may repeat."""
        columns, block_size = self.columns, self.kv.block_size
        columns.num_inflight_tokens[rows] = columns.num_inflight_samples[rows] = 0
        for row in dict.fromkeys(rows.tolist()):
            columns.write_back(row)
            num_blocks = self.kv.num_blocks_for(int(columns.num_computed_tokens[row]))
            self.kv.trim(row, num_blocks)
            columns.num_slots[row] = num_blocks * block_size

    def preempt(self, row: int, now: float) -> None:
        request = self.columns.write_back(row)
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        num_computed_tokens = self.columns.num_cacheable_tokens(row)
        if self._should_swap(num_computed_tokens) and self.kv.offload(row, request, num_computed_tokens):
            self.stats.num_swap_preemptions += 1
        self._leave(row)
        self._count_waiting(request, 1)
        self._queue(request, now)
        self._start_ageing(request, now)

    def end(self, request: Request, reason: FinishReason, now: float, *, keep_cached: bool = True) -> None:
        if request.state is RequestState.RUNNING:
            if request.session_id and keep_cached and reason is not FinishReason.ERROR:
                row = request.row
                self.columns.write_back(row)
                self.kv.keep_session(row, request, self.columns.num_cacheable_tokens(row), now)
            self._leave(request.row, keep_cached=keep_cached)
        else:
            self._count_waiting(request, -1)
            self._stop_waiting(request)
        del self.requests[request.request_id]
        self._release_followers(request, now)
        request.ages_since = None
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self.observe_end(request, now)

    def release_followers(self, now: float) -> None:
        """Queue followers whose leader has computed all but the prompt's last token."""
        num_computed_tokens = self.columns.num_computed_tokens
        ready = [r for r in self.leaders.values() if num_computed_tokens[r.row] >= r.num_prompt_tokens - 1]
        for leader in ready:
            self._release_followers(leader, now)

    def _release_followers(self, leader: Request, now: float) -> None:
        self.leaders.pop(leader.request_id, None)
        followers, leader.followers = leader.followers, []
        for follower in followers:
            self._queue(follower, now)
            self._start_ageing(follower, now if leader.ages_since is None else leader.ages_since)

    def _stop_waiting(self, request: Request) -> None:
        leader = request.leader
        if leader is None or request not in leader.followers:
            self._dequeue(request)
            return
        leader.followers.remove(request)
        if leader.is_new:
            self.waiting.count(leader, -1)
        if not leader.followers:
            self.leaders.pop(leader.request_id, None)

    def _should_swap(self, num_computed_tokens: int) -> bool:
        """Return whether to copy blocks out and back: always, never, or if computing them again takes longer."""
        mode, block_seconds = self.config.preemption_mode, self.config.swap_seconds_per_block
        if mode == "auto" and block_seconds is not None:
            swap_seconds = 2.0 * (num_computed_tokens // self.kv.block_size) * block_seconds
            return swap_seconds < num_computed_tokens * self.step_time.seconds_per_token
        return mode == "swap"

    def _leave(self, row: int, *, keep_cached: bool = True) -> None:
        columns = self.columns
        request = columns.write_back(row)
        self.leaders.pop(request.request_id, None)
        if keep_cached:
            self.kv.commit(row, request, columns.num_cacheable_tokens(row))
        else:
            self.kv.forget(row)
        request.num_new_blocks += int(columns.num_slots[row] - columns.num_shared_slots[row]) // self.kv.block_size
        last_step = int(columns.last_step[row])
        is_in_flight = bool(self.in_flight) and last_step >= self.in_flight[0].step_id
        self.kv.free(row, after_step=last_step if is_in_flight else None)
        columns.leave(row)
        if request.lora is not None:
            self.loras.leave(row)

    def _count_waiting(self, request: Request, change: int) -> None:
        self.stats.num_waiting_tokens += change * request.num_tokens
        self.stats.waiting_by_class[request.priority - 1] += change

    def _class_that_counts(self, request: Request) -> int:
        return request.service_class if self.policy.by_class else 0


def _awaits_objective(event: TimedEvent[Request]) -> bool:
    request = event.subject
    return request.is_new and not request.is_finished and not request.is_demoted
