"""Room for those who need it, at the cost of running requests: blocks to grow into, and a way in for CRITICAL.

Both are settled before a batch is put together, so no row of the batch is a victim.
"""

from __future__ import annotations

from itertools import islice

from tidewheel.request import Priority, Request, RequestState
from tidewheel.scheduler.plan import StepLimits
from tidewheel.scheduler.policy import Rank
from tidewheel.scheduler.state import State
from tidewheel.scheduler.victims import choose_victim, protected_row


def service_key(state: State, row: int) -> Rank:
    """Where a running row stands among all, running and waiting."""
    columns = state.columns
    return state.waiting.key(columns.ranks[row], columns.request(row).tenant)


def make_room_to_grow(state: State, needy: list[int], now: float) -> list[int]:
    """Blocks ran out for rows that need one more each. Rows leave until there are enough for the rest, nobody for
    the sake of a lower class. Returns the rows that must sit out this step.

    A victim in flight gives its blocks back only when its step is applied: the rows that count on them, those served
    last, wait for that and take no further victim.
    """
    columns, kv = state.columns, state.kv
    first = protected_row(columns)
    needy = sorted(needy, key=lambda row: (row != first, service_key(state, row)))
    while True:
        needy = [row for row in needy if columns.running[row]]
        num_missing = len(needy) - kv.num_free_blocks
        if num_missing <= 0:
            return []
        if kv.num_held_blocks >= num_missing:
            return needy[-num_missing:]
        victim = choose_victim(
            columns,
            lowest_class=int(columns.classes[needy].max()),
            max_preemptions=state.config.max_preemptions,
        )
        if victim is None:
            return needy[-num_missing:]
        state.preempt(victim, now)


def make_way_for_critical(state: State, limits: StepLimits, now: float) -> None:
    """Waiting CRITICAL requests that find no row or no blocks take them from running ones of lower classes.

    Only as many as this step has tokens for, and only if the blocks of all lower classes together are enough.
    """
    if not state.policy.by_class or not state.waiting.has_head:
        return
    budget = max(limits.token_budget - state.columns.num_running, 1)  # decodes come first
    num_blocks, joins = limits.keep_free, limits.max_joins
    heads = list(islice(state.waiting.leading(Priority.CRITICAL), limits.max_running))
    for num_rows, request in enumerate(heads, 1):
        is_new = request.state is RequestState.WAITING
        if budget < 1 or (is_new and joins < 1):
            return
        hit = state.find_hit(request)
        num_blocks += state.kv.num_blocks_for(request.num_tokens) - len(hit.block_ids)
        if not _make_way(state, limits, num_rows, num_blocks, now):
            return
        budget -= request.num_tokens - hit.num_tokens
        joins -= is_new


def _make_way(state: State, limits: StepLimits, num_rows: int, num_blocks: int, now: float) -> bool:
    """Preempts lower classes until so many rows and blocks are free; False if they are not, or not yet."""
    columns, kv = state.columns, state.kv
    while True:
        missing_rows = num_rows - min(columns.num_free_rows, limits.max_running - columns.num_running)
        num_wanted = num_blocks + columns.num_full_rows  # those that decode take theirs first
        missing_blocks = num_wanted - kv.num_free_blocks - kv.num_held_blocks
        if missing_rows <= 0 and missing_blocks <= 0:
            return num_wanted <= kv.num_free_blocks
        lower = columns.running & (columns.classes > Priority.CRITICAL)
        if missing_blocks * kv.block_size > int(columns.num_slots[lower].sum()):
            return False
        victim = choose_victim(columns, lowest_class=Priority.HIGH, max_preemptions=state.config.max_preemptions)
        if victim is None:
            return False
        state.preempt(victim, now)


def may_enter(state: State, limits: StepLimits, request: Request, joins_left: int) -> bool:
    """Is there a row for the request, and does the strategy let it join? One that returns does not ask it."""
    if not state.columns.num_free_rows or state.columns.num_running >= limits.max_running:
        return False
    return joins_left > 0 or request.state is not RequestState.WAITING
