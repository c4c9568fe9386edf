"""Plan of one step.

Requests overtake one that cannot enter only if it waits for another to compute a common prefix: small requests must
not starve a large one.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from tidewheel.batch import Int32Array, RowArray
from tidewheel.errors import InternalError
from tidewheel.kvcache.prefix import PrefixHit
from tidewheel.request import Priority, Request
from tidewheel.scheduler.cache_pressure import GrowthForecast, free_blocks_to_grow, victims_for
from tidewheel.scheduler.policy import Rank, level_of, shared_level
from tidewheel.scheduler.queue import next_in_line
from tidewheel.scheduler.speculation import Speculation
from tidewheel.scheduler.state import BlockedRequest, SchedulerState
from tidewheel.scheduler.step_plan import ShapeTurns, StepLimits, StepPlan, Turn, new_row

MAX_DIGESTS = 1024  # computed per step
MAX_SKIPPED = 16  # requests per step


class StepPlanner:
    """Planner of one step: decodes first, so that no prompt delays them, then prompts in order."""

    def __init__(self, state: SchedulerState, limits: StepLimits, now: float) -> None:
        self._state = state
        self._plan = StepPlan(limits)
        self._now = now
        self._is_open = True
        self._by_cache = state.config.cache_aware_order and state.policy.by_arrival and state.policy.by_class
        self._growth: GrowthForecast | None = None
        self._blocked: BlockedRequest | None = None
        self._skipped: set[str] = set()
        self._digests_left = MAX_DIGESTS
        self._cached: dict[str, int] = {}

    def plan(self) -> StepPlan:
        state, plan = self._state, self._plan
        if state.loras.waiting:
            for row in state.loras.begin_step(state.waiting.candidates(with_new=True)):
                state.preempt(row, self._now)
        decode_rows, decode_starts, chunk_rows = state.columns.gaps()
        if state.turns is None:
            if len(decode_rows):
                self._plan_decodes(decode_rows, decode_starts)
            self._plan_prompts(chunk_rows)
        else:
            self._plan_turn(state.turns, decode_rows, decode_starts)
        speculation = state.speculation
        has_all = plan.has_decodes_alone and len(plan.decode_rows) == len(decode_rows)
        if speculation is not None and speculation.has_proposals and has_all and not state.in_flight:
            self._plan_drafts(speculation)
        if plan.has_decodes_alone:
            state.turned_away = len(state.requests), state.columns.num_running
        self._grow()
        state.blocked = self._blocked and self._blocked._replace(
            num_needed=self._blocked.num_needed - len(plan.growing_rows), num_free=state.kv.num_free_blocks
        )
        return plan

    def _plan_turn(self, turns: ShapeTurns, rows: RowArray, starts: Int32Array) -> None:
        for heads in (self._next_waiting(), []):  # if no head can enter, running rows take the turn
            if self._plan.is_empty and (heads or len(rows)):
                chosen = self._choose_rows(turns, rows, heads)
                self._plan_decodes(rows[chosen], starts[chosen])
                self._plan_entries()

    def _next_waiting(self) -> list[Request]:
        """Return the first waiting requests, as many as rows are free; else one that may preempt."""
        columns, num_free = self._state.columns, self._num_free_rows()
        candidates = self._state.waiting.candidates(with_new=self._plan.limits.max_joins > 0)
        can_preempt = columns.classes[columns.running].max(initial=0) > Priority.CRITICAL
        heads = islice(candidates, max(num_free, 1))
        return [head for head in heads if num_free > 0 or (can_preempt and self._may_preempt(head))]

    def _choose_rows(self, turns: ShapeTurns, rows: RowArray, heads: list[Request]) -> RowArray:
        """Choose the step's turn. Return indices of the rows to compute: in a slice, those that waited longest."""
        columns, plan = self._state.columns, self._plan
        is_critical = columns.classes[rows] == Priority.CRITICAL
        shapes = [request.bucket for request in columns.requests(rows)]
        active = [
            *map(Turn, shapes, is_critical.tolist()),
            *(Turn(one.bucket, self._may_preempt(one)) for one in heads),
        ]
        plan.turn = turn = turns.choose(dict.fromkeys(active))
        plan.bucket, most = turn.shape, turns.max_rows(turn.shape, plan.limits.slice_s)
        chosen = np.flatnonzero((np.array(shapes, object) == turn.shape) & (is_critical | (not turn.is_urgent)))
        if most is not None:
            plan.token_budget = most
            chosen = chosen[columns.last_step[rows[chosen]].argsort(kind="stable")[:most]]
        return chosen

    def _in_turn(self, candidates: Iterable[Request], turn: Turn) -> Iterator[Request]:
        """Yield requests of the turn. Each better one of another turn keeps a row free."""
        num_free = self._num_free_rows()
        for request in candidates:
            if request.bucket == turn.shape and (self._may_preempt(request) or not turn.is_urgent):
                yield request
            elif (num_free := num_free - 1) < 1:
                return

    def _plan_decodes(self, rows: RowArray, starts: Int32Array) -> None:
        state, plan, columns = self._state, self._plan, self._state.columns
        plan.num_sitting_out = 0
        if plan.limits.max_decodes is not None and len(rows) > plan.limits.max_decodes:
            rows, starts, plan.num_sitting_out = self._most_urgent(rows, starts, plan.limits.max_decodes)
        full = starts >= columns.num_slots.take(rows)
        if np.count_nonzero(full) > state.kv.num_free_blocks:
            plan.is_scarce = True
            sitting_out = free_blocks_to_grow(state, rows[full], self._now)
            plan.num_sitting_out += len(sitting_out)
            stays = columns.running[rows] & ~np.isin(rows, sitting_out)
            rows, starts, full = rows[stays], starts[stays], full[stays]
        plan.set_decodes(rows, starts, full)

    def _most_urgent(self, rows: RowArray, starts: Int32Array, most: int) -> tuple[RowArray, Int32Array, int]:
        """Return the rows that decode in the step, their positions, and the number of other rows that need a block.

        Only rows with less slack and rows of a better class than all that have a time per output token pass others.
        """
        columns = self._state.columns
        is_chosen = np.zeros(len(rows), np.bool_)
        is_chosen[columns.next_due(rows).argsort(kind="stable")[:most]] = True
        is_chosen |= columns.classes[rows] < columns.classes[columns.tpots < np.inf].min()
        num_full = np.count_nonzero(starts[~is_chosen] >= columns.num_slots[rows[~is_chosen]])
        return rows[is_chosen], starts[is_chosen], int(num_full)

    def _plan_drafts(self, speculation: Speculation) -> None:
        """Add drafts to a step of all decodes alone; drafts take no row's place."""
        state, plan, columns = self._state, self._plan, self._state.columns
        rows, starts, block_size = plan.decode_rows, plan.decode_starts, state.kv.block_size
        num_left = columns.max_num_tokens.take(rows) - starts - 2  # after the token of the step
        budget = max(min(plan.token_budget, plan.limits.max_scores), 0)
        counts = speculation.choose(rows, num_left, budget)
        num_slots = columns.num_slots.take(rows)
        num_blocks = int(((starts + counts - num_slots) // block_size + 1).clip(0).sum())
        if counts.any() and num_blocks + plan.num_sitting_out <= state.kv.num_free_blocks:
            plan.add_drafts(counts, speculation.drafts(rows, counts), num_slots, block_size)

    def _grow(self) -> None:
        state, plan, rows = self._state, self._plan, self._plan.growing_rows
        if not len(rows):
            return
        starts, block_size = plan.growing_starts, state.kv.block_size
        blocks = state.kv.grow(rows.tolist())
        if blocks is None:
            raise InternalError(f"admission left no blocks for {len(rows)} rows that grow")
        plan.add_blocks(rows.tolist(), (starts // block_size).tolist(), blocks)
        state.columns.num_slots[rows] = starts + block_size

    def _plan_prompts(self, rows: RowArray) -> None:
        state, plan, columns = self._state, self._plan, self._state.columns
        running = columns.requests(rows[columns.running[rows]]) if len(rows) else []
        for key, _, request in sorted((state.waiting.key(request), request.row, request) for request in running):
            self._plan_entries(before=key)
            if plan.token_budget < 1:
                return
            row = request.row
            if row < 0:
                continue  # preempted for a CRITICAL request
            start = int(columns.num_computed_tokens[row] + columns.num_inflight_tokens[row])
            end = int(columns.num_tokens[row])
            if plan.may_share(level_of(state.policy, request)) and plan.is_short(end - start):
                plan.add_chunk(row, start, end, shared_level(state.policy, request), scores=request.scores_prompt)
        self._plan_entries()
        plan.give_back()

    def _plan_entries(self, before: Rank | None = None) -> None:
        while self._is_open and self._state.waiting:
            request = self._next()
            if request is None or (before is not None and self._state.waiting.key(request) >= before):
                return
            if not self._try(request):
                self._is_open, self._by_cache = self._by_cache, False  # an earlier one may fit

    def _next(self) -> Request | None:
        state = self._state
        candidates = state.waiting.candidates(with_new=self._plan.num_joined < self._plan.limits.max_joins)
        bucket, turn = self._plan.bucket, self._plan.turn
        if turn is not None:
            candidates = self._in_turn(candidates, turn)
        candidates = (
            one for one in candidates if one.request_id not in self._skipped and bucket in (None, one.bucket)
        )
        if state.loras.waiting:
            candidates = state.loras.admissible(candidates)
        if self._by_cache and self._num_free_rows() > 0:
            before = self._now - state.config.ageing_s
            return next_in_line(candidates, self._num_cached_tokens, before=before, by_tenant=state.policy.by_tenant)
        return next(candidates, None)

    def _num_cached_tokens(self, request: Request) -> int:
        count = self._cached.get(request.request_id)
        if count is None:
            kv = self._state.kv
            num_digests = request.num_tokens // kv.block_size - len(request.block_hashes)
            if num_digests > self._digests_left:
                return 0
            self._digests_left -= max(num_digests, 0)
            count = self._cached[request.request_id] = kv.prefixes.estimate(request)
        return count

    def _try(self, request: Request) -> bool:
        """Let the request enter, move to another class, or wait for a prefix. Return False if it is blocked."""
        state, plan = self._state, self._plan
        self._blocked = None
        if not self._has_turn(request):
            return False
        if state.drop_over_quota(request, self._now):
            return True
        hit = state.find_hit(request)
        if self._awaits_prefix(request, hit):
            self._skipped.add(request.request_id)
            self._is_open = len(self._skipped) < MAX_SKIPPED
            return True
        if not plan.is_short(request.num_tokens - hit.num_tokens):
            return False
        if self._make_way(request, hit):
            hit = state.find_hit(request)  # offloading may evict its host blocks
        elif not self._fits(request, hit):
            return False
        return self._enter(request, hit)

    def _has_turn(self, request: Request) -> bool:
        plan = self._plan
        if not plan.may_share(level_of(self._state.policy, request)) or self._exceeds_batch(request):
            return False
        if self._may_preempt(request):
            return plan.token_budget > 0 or not plan.chunk_ends  # may take tokens of decodes
        if plan.token_budget < 1 or self._num_free_rows() < 1:
            return False
        if plan.is_scarce:
            self._note_missing(request, self._state.find_hit(request))
        return not plan.is_scarce

    def _exceeds_batch(self, request: Request) -> bool:
        """Return whether a request, never split or with audio to encode, waits for a step with more room."""
        num_encoded = self._plan.encoder_tokens
        if num_encoded and num_encoded + request.encoder_tokens > self._plan.limits.token_budget:
            return True
        return bool(request.bucket and self._plan.new_rows) and request.num_prompt_tokens > self._plan.token_budget

    def _enter(self, request: Request, hit: PrefixHit) -> bool:
        state, plan = self._state, self._plan
        was_new, plan.bucket = request.is_new, request.bucket
        plan.encoder_tokens += request.encoder_tokens
        blocks = state.enter(request, hit, keep_free=plan.num_blocks_kept(state.columns.num_running))
        if blocks is None:
            self._note_missing(request, hit)
            return False
        if was_new:
            plan.num_joined += 1 + len(request.followers)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._now
            request.num_cached_tokens = hit.num_tokens
            plan.started.append(request)
            if state.virtual_counters is not None:
                state.virtual_counters.charge(request.tenant, request.num_prompt_tokens - hit.num_tokens, 0)
            if state.kv.prefixes.is_enabled:
                state.stats.num_prefix_queries += request.num_prompt_tokens
                state.stats.num_prefix_hits += hit.num_tokens
        plan.new_rows.append(new_row(request))
        plan.add_blocks([request.row] * len(blocks), range(len(blocks)), blocks)
        level = shared_level(state.policy, request)
        plan.add_chunk(request.row, hit.num_tokens, request.num_tokens, level, scores=request.scores_prompt)
        return True

    def _fits(self, request: Request, hit: PrefixHit) -> bool:
        state, plan = self._state, self._plan
        if self._may_preempt(request) or not state.columns.num_running or not state.config.admit_by_growth:
            return self._num_free_rows() > 0 and plan.token_budget > 0
        if self._growth is None:
            self._growth = GrowthForecast(state)
        keep_free = plan.num_blocks_kept(state.columns.num_running)
        num_slots = self._growth.num_missing_slots(request, hit, keep_free=keep_free)
        if num_slots > 0.0:
            self._note_missing(request, hit, math.ceil(num_slots / state.kv.block_size))
        return num_slots <= 0.0

    def _note_missing(self, request: Request, hit: PrefixHit, num_missing: int | None = None) -> None:
        """Record that the request waits for blocks (`num_missing`; None: counted from its tokens and the reserve)."""
        kv, num_free = self._state.kv, self._state.kv.num_free_blocks
        if num_missing is None:
            keep_free = self._plan.num_blocks_kept(self._state.columns.num_running)
            num_missing = kv.num_missing_blocks(request.num_tokens, hit, keep_free=keep_free)
        if num_missing > 0:
            num_own = num_free + kv.num_missing_blocks(request.num_tokens, hit)
            self._blocked = BlockedRequest(request, num_own, num_free + num_missing, num_free)

    def _make_way(self, request: Request, hit: PrefixHit) -> bool:
        state, plan = self._state, self._plan
        if not self._may_preempt(request):
            return False
        victims = victims_for(state, plan, request, hit, needs_row=self._num_free_rows() < 1)
        for row in victims:
            state.preempt(row, self._now)
        plan.drop_decodes(victims)
        self._growth = None
        return bool(victims)

    def _may_preempt(self, request: Request) -> bool:
        state = self._state
        is_critical = state.policy.by_class and request.service_class is Priority.CRITICAL
        return is_critical and (not request.bucket or state.turns is not None)

    def _num_free_rows(self) -> int:
        columns = self._state.columns
        return min(len(columns.free_rows), self._plan.limits.max_running - columns.num_running)

    def _awaits_prefix(self, request: Request, hit: PrefixHit) -> bool:
        """Return whether a row computes the request's prefix in this step, or later half of its missing tokens."""
        state, prefixes = self._state, self._state.kv.prefixes
        if not prefixes.computing or request.needs_all_states:
            return False
        num_blocks, row = prefixes.find_computing(request, hit)
        if not num_blocks:
            return False
        num_shared = num_blocks * state.kv.block_size
        columns = state.columns
        position = int(columns.num_computed_tokens[row] + columns.num_inflight_tokens[row])
        reached = self._plan.chunk_ends.get(row, position)
        if reached >= hit.num_blocks * state.kv.block_size + num_shared:
            return True
        is_behind = state.waiting.key(columns.request(row)) > state.waiting.key(request)  # it may starve
        return not is_behind and 2 * num_shared >= request.num_tokens - hit.num_tokens
