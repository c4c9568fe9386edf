"""The decisions of one step: who gets how many tokens and blocks, who has to leave, who may enter."""

from __future__ import annotations

import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.request import Request
from tidewheel.scheduler.admission import Admission
from tidewheel.scheduler.columns import RowArray
from tidewheel.scheduler.plan import StepPlan, new_row
from tidewheel.scheduler.policy import Rank, choose_victim
from tidewheel.scheduler.state import State


def plan_step(state: State, admission: Admission, token_budget: int, now: float) -> StepPlan:
    """Rows that miss one token come first, so that a long prompt never holds up a decode. What is left of the budget
    goes to prompts in the order of the policy, those that are under way and those that wait alike."""
    plan = StepPlan(token_budget)
    decode_rows, decode_starts, chunk_rows = state.columns.gaps()
    _plan_decodes(state, plan, decode_rows, decode_starts)
    _plan_prompts(state, plan, admission, chunk_rows, now)
    return plan


def _plan_decodes(state: State, plan: StepPlan, rows: RowArray, starts: Int32Array) -> None:
    full = starts >= state.columns.num_slots.take(rows)
    if np.count_nonzero(full):
        needy = rows[full]
        if not _grow(state, plan, needy):
            plan.is_scarce = True
            sitting_out = _grow_by_rank(state, plan, needy)
            keep = state.columns.running[rows] & ~np.isin(rows, sitting_out)
            rows, starts = rows[keep], starts[keep]
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


def _grow_by_rank(state: State, plan: StepPlan, needy: RowArray) -> list[int]:
    """Blocks ran out: best row first, at the cost of the worst. Returns the rows that must sit out this step.

    A victim in flight gives its blocks back only when its step is applied; a row that can count on them waits for
    that, and takes no further victim.
    """
    columns = state.columns
    sitting_out: list[int] = []
    for row in sorted(needy.tolist(), key=columns.ranks.__getitem__):
        while columns.running[row] and not _grow(state, plan, np.array([row])):
            if state.kv.num_held_blocks > len(sitting_out):
                sitting_out.append(row)
                break
            state.preempt(choose_victim(columns.ranks))
    return sitting_out


def _plan_prompts(state: State, plan: StepPlan, admission: Admission, rows: RowArray, now: float) -> None:
    columns = state.columns
    may_enter = not plan.is_scarce
    for row in sorted(rows[columns.running[rows]].tolist(), key=columns.ranks.__getitem__):
        may_enter = may_enter and _admit(state, plan, admission, now, before=columns.ranks[row])
        if plan.token_budget < 1:
            return
        start = int(columns.num_computed_tokens[row] + columns.num_inflight_tokens[row])
        plan.add_chunk(row, start, int(columns.num_tokens[row]))
    if may_enter:
        _admit(state, plan, admission, now)


def _admit(state: State, plan: StepPlan, admission: Admission, now: float, before: Rank | None = None) -> bool:
    """Lets waiting requests enter, in order, while rows, budget and blocks last; those with a rank `before` this one.

    False once the head cannot enter: it is not overtaken. A request takes the blocks of all its tokens when it
    enters, so a prompt that is under way never runs out of them.
    """
    while state.waiting and (before is None or state.waiting.head_rank() < before):
        if not state.columns.has_free_row or plan.token_budget < 1:
            return False
        request = state.waiting.head()
        hit = state.kv.find_prefix(request)
        blocks = state.enter(request, hit, keep_free=admission.headroom if state.columns.num_running else 0)
        if blocks is None:
            return False
        if request.first_scheduled_time is None:
            _record_first_start(state, request, hit.num_tokens, now)
            admission.record_start(now)
        plan.add_row(new_row(request))
        plan.add_blocks([request.row] * len(blocks), range(len(blocks)), blocks)
        plan.add_chunk(request.row, hit.num_tokens, request.num_tokens)
    return True


def _record_first_start(state: State, request: Request, num_cached_tokens: int, now: float) -> None:
    request.first_scheduled_time = now
    request.num_cached_tokens = num_cached_tokens
    if state.kv.enable_prefix_caching:
        state.counters.num_prefix_queries += request.num_prompt_tokens
        state.counters.num_prefix_hits += num_cached_tokens
