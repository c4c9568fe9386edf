"""Checks of a scheduler's tables against each other, at any time between two of its calls."""

from __future__ import annotations

import numpy as np

from support.kvcache.invariants import check_cache
from tidewheel.errors import require
from tidewheel.lora import NO_SLOT
from tidewheel.request import Priority, Request, RequestState
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.lora_slots import LoraSlots
from tidewheel.scheduler.queue import WaitingSet, _age
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.scheduler.state import SchedulerState


def check_invariants(scheduler: Scheduler) -> None:
    """Check all tables, also while requests run and batches are in flight. Raise `InternalError`."""
    scheduler.check_invariants()
    check_cache(scheduler._state.kv)
    state, columns = scheduler._state, scheduler._state.columns
    _check_requests(state)
    require(len(state.in_flight) <= scheduler.max_inflight_steps, "too many batches in flight")
    if not state.in_flight:
        in_flight = columns.num_inflight_tokens + columns.num_inflight_samples
        require(int(in_flight[columns.running].sum()) == 0, "tokens are in flight without a batch")
        require(state.kv.transfers.num_returning_blocks() == 0, "blocks are held without a batch")


def _check_requests(state: SchedulerState) -> None:
    check_columns(state.columns)
    check_waiting_set(state.waiting)
    running = state.columns.requests(state.columns.running.nonzero()[0])
    queued = list(state.waiting)
    attached = [follower for leader in (*queued, *running) for follower in leader.followers]
    waiting = [*queued, *attached]
    states = {request.state for request in waiting}
    require(states <= {RequestState.WAITING, RequestState.PREEMPTED}, f"waiting requests are {states}")
    placed = {request.request_id: request for request in (*waiting, *running)}
    require(len(placed) == len(waiting) + len(running), "a request is in two places")
    require(placed == state.requests, "requests are lost or left over")
    _check_waiting(state, queued, attached)
    check_lora_slots(state.loras, running, queued)
    leaders = {request.request_id for request in running if request.followers}
    require(state.leaders.keys() == leaders, "running leaders are listed wrongly")
    for request in running:
        num_slots = len(state.kv.block_table(request.row)) * state.kv.block_size
        require(int(state.columns.num_slots[request.row]) == num_slots, f"{request} has {num_slots} slots")
        service_class = int(state.columns.classes[request.row])
        require(service_class == state._class_that_counts(request), f"{request} runs in another class")


def _check_waiting(state: SchedulerState, queued: list[Request], attached: list[Request]) -> None:
    waiting = [*queued, *attached]
    require(state.stats.num_waiting_tokens == sum(r.num_tokens for r in waiting), "waiting tokens are miscounted")
    by_class = [sum(request.priority is p for request in waiting) for p in Priority]
    require(state.stats.waiting_by_class == by_class, "classes are miscounted")
    unlifted = [r for r in queued if r.service_class > Priority.HIGH and r.ages_since is None]
    require(not unlifted, f"{unlifted} wait to be lifted for ever")
    require(all(request.ages_since is None for request in attached), "followers are lifted without their leader")


def check_columns(columns: RowColumns) -> None:
    rows = np.flatnonzero(columns.running)
    require(len(rows) == columns.num_running, "running rows are miscounted")
    require(len(columns.free_rows) + columns.num_running == columns.num_rows, "rows are lost")
    require(not columns.running[columns.free_rows].any(), "a free row is running")
    for row in rows.tolist():
        request = columns.request(row)
        require(request.row == row and request.state is RequestState.RUNNING, f"{request} is not in row {row}")
        num_tokens = request.num_tokens + int(columns.num_recent[row])
        require(int(columns.num_tokens[row]) == num_tokens, f"{request} has {columns.num_tokens[row]} tokens")
        require(int(columns.num_recent[row]) <= columns._recent.shape[1], f"{request} has too many recent tokens")
    start = columns.num_computed_tokens + columns.num_inflight_tokens
    known = columns.num_tokens + columns.num_inflight_samples
    for name, holds in (
        ("tokens in flight", (columns.num_inflight_tokens >= 0) & (columns.num_inflight_samples >= 0)),
        ("computed tokens", (columns.num_computed_tokens >= 0) & (start <= known)),
        ("length", (columns.num_tokens < columns.max_num_tokens) & (known <= columns.max_num_tokens)),
        ("slots", start <= columns.num_slots),
    ):
        require(bool(holds[rows].all()), f"{name} of row {rows[~holds[rows]].tolist()}")


def check_waiting_set(waiting: WaitingSet) -> None:
    lanes = waiting._lanes.values()
    new = [request for lane in lanes for request in lane.new]
    require(all(lane.new or lane.returning for lane in lanes), "an empty lane is left over")
    require(all(request.is_new for request in new), "a request that has started counts as new")
    require(not any(one.is_new for lane in lanes for one in lane.returning), "a new request counts as returning")
    for queue in (queue for lane in lanes for queue in lane):
        keys = [request.rank for request in queue]
        require(keys == sorted(keys), "a queue is out of order")
    by_age = [request for queue in waiting._ages.values() for request in queue]
    require(len(by_age) == len(new) and set(by_age) == set(new), "new requests and their ages disagree")
    for service_class in Priority:
        ages = [_age(request) for request in waiting._ages[service_class]]
        require(ages == sorted(ages), "new requests are out of order of age")
        is_right = all(request.service_class is service_class for request in waiting._ages[service_class])
        require(is_right, "a new request is listed in another class")
        num_tokens = sum((1 + len(r.followers)) * r.num_tokens for r in new if r.service_class is service_class)
        require(waiting._new_tokens[service_class] == num_tokens, f"tokens of {service_class.name} are miscounted")
    require(waiting.num_new == sum(1 + len(r.followers) for r in new), "new requests are miscounted")
    require(len(waiting._crowds) == len(waiting._num_new), "crowds are miscounted")
    for name, count in waiting._num_new.items():
        require(count == sum(1 + len(r.followers) for r in new if r.tenant == name), f"{name!r} is miscounted")


def check_lora_slots(loras: LoraSlots, running: list[Request], waiting: list[Request]) -> None:
    rows = {request.row: request.lora for request in running if request.lora is not None}
    holding = {int(row) for row in np.flatnonzero(loras._slots_of_rows != NO_SLOT)}
    require(holding == rows.keys(), "rows hold slots without an adapter, or none with one")
    for row, lora in rows.items():
        require(loras._slots[loras._slots_of_rows[row]].lora is lora, f"row {row} holds another adapter's slot")
    placed = {slot.lora: slot for slot in loras._slots if slot.lora is not None}
    require(placed == loras._slot_of, "adapters and slots disagree")
    for slot in loras._slots:
        count = int(np.count_nonzero(loras._slots_of_rows == slot.number))
        require(slot.num_rows == count, f"slot {slot.number} counts {slot.num_rows} rows of {count}")
    expected = {request for request in waiting if request.lora is not None}
    require({one for group in loras.waiting.values() for one in group} == expected, "waiting adapters are lost")
    require(all(loras.waiting.values()), "an adapter without requests waits")
