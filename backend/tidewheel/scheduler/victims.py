"""Which running requests leave when others need their rows or blocks: all of them are needed, or none is touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tidewheel.kvcache.hits import PrefixHit
from tidewheel.request import Priority, Request
from tidewheel.scheduler.columns import Columns, RowArray
from tidewheel.scheduler.plan import StepPlan
from tidewheel.scheduler.state import State


def make_room_to_grow(state: State, needy: RowArray, now: float) -> list[int]:
    """Preempt rows until the others of `needy` can have one more block each; return the rows that must wait.

    No row leaves for one of a lower class. Blocks of a row in flight come back when its step is applied: the rows
    that count on them, those served last, wait for that.
    """
    columns, kv = state.columns, state.kv
    first = protected_row(columns)
    served = needy
    while len(served) > kv.num_free_blocks + kv.num_held_blocks:
        lowest_class = int(columns.classes[served].max())
        rows = [row for row in order_of_victims(state, lowest_class) if row != first]
        num_missing = len(served) - kv.num_free_blocks - kv.num_held_blocks
        victims = choose_victims(state, rows, num_missing, growing=served.tolist())
        if victims is not None:
            for row in victims:
                state.preempt(row, now)
            break
        served = served[columns.classes[served] < lowest_class]  # the lowest class waits for the sake of the others
    needy = needy[columns.running[needy]]
    num_waiting = max(len(needy) - kv.num_free_blocks, 0)
    if not num_waiting:
        return []
    return sorted(needy.tolist(), key=lambda row: (row != first, state.service_key(row)))[-num_waiting:]


def victims_for(
    state: State, plan: StepPlan, request: Request, hit: PrefixHit, *, needs_row: bool
) -> list[int] | None:
    """Choose running rows of lower classes that make way for a CRITICAL request; None if they are not enough.

    Rows whose chunk is planned already stay. The result is empty where blocks that batches in flight hold are
    enough: the request waits for those.
    """
    columns, kv = state.columns, state.kv
    keep_free = plan.num_blocks_kept(columns.num_running)
    num_missing = kv.num_missing_blocks(request.num_tokens, hit, keep_free=keep_free)
    if num_missing > 0 and state.last_applied < state.stats.num_steps - 1:
        num_missing += _num_growing_next(columns) - kv.num_held_blocks
    if num_missing <= 0 and not needs_row:
        return []
    lower = columns.running & (columns.classes > Priority.CRITICAL)
    num_held = int(columns.num_slots[lower].sum()) // kv.block_size  # shared blocks count for each row
    if num_missing > min(num_held, kv.num_blocks - kv.num_free_blocks) + len(plan.growing_rows):
        return None
    planned = plan.chunk_ends
    rows = [row for row in order_of_victims(state, Priority.HIGH) if row not in planned]
    growing = plan.growing_rows.tolist()
    return choose_victims(state, rows, num_missing, kept=hit.block_ids, growing=growing, min_victims=int(needs_row))


def protected_row(columns: Columns) -> int:
    """Return the oldest running request of the highest class: no growing row takes its blocks, so it progresses."""
    rows = columns.running.nonzero()[0]
    order = np.lexsort((columns.sequences[rows], columns.arrival_times[rows], columns.classes[rows]))
    return int(rows[order[0]])


def order_of_victims(state: State, lowest_class: int) -> list[int]:
    """Return the running rows of `lowest_class` or lower ones, those that lose least first.

    The lowest class goes first, in it the row with the fewest computed tokens, of these the youngest. Rows that were
    preempted `max_preemptions` times go last.
    """
    columns = state.columns
    rows = (columns.running & (columns.classes >= lowest_class)).nonzero()[0]
    order = np.lexsort(
        (
            -columns.sequences[rows],
            -columns.arrival_times[rows],
            columns.num_computed_tokens[rows],
            -columns.classes[rows],
            columns.num_preemptions[rows] >= state.config.max_preemptions,
        )
    )
    return [int(row) for row in rows[order]]


def choose_victims(
    state: State,
    rows: Sequence[int],
    num_missing: int,
    *,
    kept: Sequence[int] = (),
    growing: Iterable[int] = (),
    min_victims: int = 0,
) -> list[int] | None:
    """Choose from `rows`, in order, so many that `num_missing` blocks come free; None if all are not enough.

    A victim that is `growing` needs one block less. Blocks in `kept` do not count. Every victim is needed: without
    any one of them, blocks or victims would be too few.
    """
    departures = state.kv.departures(kept)
    relieved = set(growing)
    wanted = num_missing
    victims: list[int] = []
    for row in rows:
        if num_missing <= 0 and len(victims) >= min_victims:
            break
        victims.append(row)
        num_missing -= departures.add(row) + (row in relieved)
    if num_missing > 0 or len(victims) < min_victims:
        return None
    for row in victims[-2::-1]:  # the last one was needed beside all others
        loss = departures.num_freed(row) + (row in relieved)
        if loss <= -num_missing and len(victims) > min_victims:
            departures.take_back(row)
            victims.remove(row)
            num_missing += loss
    return _alone(state, rows, victims, wanted, kept) if len(victims) > 1 else victims


def _alone(state: State, rows: Sequence[int], victims: list[int], num_missing: int, kept: Sequence[int]) -> list[int]:
    """Return one row in place of several victims, if it frees enough and is of no better class than all of them."""
    best_class = int(state.columns.classes[victims].min())
    departures = state.kv.departures(kept)
    for row in rows:
        if state.columns.classes[row] >= best_class:
            if departures.add(row) >= num_missing:
                return [row]
            departures.take_back(row)
    return victims


def _num_growing_next(columns: Columns) -> int:
    """Count the rows that will take a block in the step after this one, at most."""
    starts = columns.num_computed_tokens + columns.num_inflight_tokens + 1
    return int(np.count_nonzero(columns.running & (starts >= columns.num_slots)))
