"""The decisions of one step: who gets how many tokens and blocks, who has to leave, who may enter.

Requests enter in the order of the policy, and a head that cannot enter is not overtaken: it would starve while
smaller ones slip past it. It waits for a row, for blocks (all that its tokens need, and the watermark), for the
strategy, or for the budget of the next step; running requests free all of these, and what they free goes to the head
first. Only a CRITICAL one does not wait for that: it takes row and blocks from lower classes.
"""

from __future__ import annotations

import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.request import Request
from tidewheel.scheduler.columns import RowArray
from tidewheel.scheduler.plan import StepLimits, StepPlan, new_row
from tidewheel.scheduler.policy import Rank, level_of
from tidewheel.scheduler.room import make_room_to_grow, make_way_for_critical, may_enter, service_key
from tidewheel.scheduler.service_class import drop_over_quota
from tidewheel.scheduler.state import State


def plan_step(state: State, limits: StepLimits, now: float) -> StepPlan:
    """Rows that miss one token come first, so that a long prompt never holds up a decode. What is left of the budget
    goes to prompts in the order of the policy, those that are under way and those that wait alike; one that does not
    fit shares it with short ones behind it, as `StepPlan` says."""
    make_way_for_critical(state, limits, now)
    plan = StepPlan(limits)
    decode_rows, decode_starts, chunk_rows = state.columns.gaps()
    _plan_decodes(state, plan, decode_rows, decode_starts, now)
    _plan_prompts(state, plan, chunk_rows, now)
    return plan


def _plan_decodes(state: State, plan: StepPlan, rows: RowArray, starts: Int32Array, now: float) -> None:
    full = starts >= state.columns.num_slots.take(rows)
    if np.count_nonzero(full):
        needy = rows[full]
        if not _grow(state, plan, needy):
            plan.is_scarce = True
            sitting_out = make_room_to_grow(state, needy.tolist(), now)
            keep = state.columns.running[rows] & ~np.isin(rows, sitting_out)
            rows, starts, full = rows[keep], starts[keep], full[keep]
            if np.count_nonzero(full):
                _grow(state, plan, rows[full])
    plan.set_decodes(rows, starts)


def _grow(state: State, plan: StepPlan, rows: RowArray) -> bool:
    """One more block for each row, or nothing."""
    row_list = rows.tolist()
    new_blocks = state.kv.grow(row_list)
    if new_blocks is None:
        return False
    columns, block_size = state.columns, state.kv.block_size
    num_slots = columns.num_slots.take(rows)
    plan.add_blocks(row_list, (num_slots // block_size).tolist(), new_blocks)
    columns.num_slots[rows] = num_slots + block_size
    columns.num_grown_blocks[rows] += 1
    return True


def _plan_prompts(state: State, plan: StepPlan, rows: RowArray, now: float) -> None:
    columns = state.columns
    is_open = not plan.is_scarce
    running = rows[columns.running[rows]].tolist()
    for key, row in sorted((service_key(state, row), row) for row in running):
        is_open = is_open and _admit(state, plan, now, before=key)
        if plan.token_budget < 1:
            return
        level = level_of(state.policy, columns.ranks[row])
        start = int(columns.num_computed_tokens[row] + columns.num_inflight_tokens[row])
        end = int(columns.num_tokens[row])
        if plan.may_share(level) and plan.is_short(end - start):
            plan.add_chunk(row, start, end, level)
    if is_open:
        _admit(state, plan, now)
    plan.give_back()


def _admit(state: State, plan: StepPlan, now: float, before: Rank | None = None) -> bool:
    """Lets waiting requests enter, in order, while rows, budget and blocks last; those that are served `before` this
    key. False once the head cannot enter.

    A request takes the blocks of all its tokens when it enters, so a prompt that is under way never runs out of them.
    """
    while state.waiting.has_head and (before is None or state.waiting.head_key() < before):
        request = state.waiting.head()
        level = level_of(state.policy, state.waiting.rank_of(request))
        may_go_on = plan.token_budget > 0 and plan.may_share(level)
        if not may_go_on or not may_enter(state, plan.limits, request, plan.joins_left):
            return False
        if drop_over_quota(state, request, now):
            continue
        hit = state.find_hit(request)
        if not plan.is_short(request.num_tokens - hit.num_tokens):
            return False
        blocks = state.enter(request, hit, keep_free=plan.limits.keep_free if state.columns.num_running else 0)
        if blocks is None:
            return False
        if request.first_scheduled_time is None:
            _start(state, plan, request, hit.num_tokens, now)
        plan.add_row(new_row(request))
        plan.add_blocks([request.row] * len(blocks), range(len(blocks)), blocks)
        plan.add_chunk(request.row, hit.num_tokens, request.num_tokens, level)
    return True


def _start(state: State, plan: StepPlan, request: Request, num_cached_tokens: int, now: float) -> None:
    request.first_scheduled_time = now
    request.num_cached_tokens = num_cached_tokens
    plan.started.append(request)
    if state.virtual_counters is not None:
        state.virtual_counters.charge(request.tenant, request.num_prompt_tokens, 0)
    if state.kv.enable_prefix_caching:
        state.counters.num_prefix_queries += request.num_prompt_tokens
        state.counters.num_prefix_hits += num_cached_tokens
