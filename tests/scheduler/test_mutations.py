"""Would the state machine notice? Deliberate bugs, put in one at a time, must each make it fail.

Found means that a promise was seen broken: an assertion of the tests, or an invariant of the scheduler. A mutation
that dies of a `TypeError` or a `KeyError` of its own has shown nothing.

* *blocks freed at once*: blocks of a request that leaves while a batch in flight names it go back to the pool, and
  the next batch writes them under the running one.
* *hash before commit*: the blocks of a prompt can be found when it enters, before their content is computed.
* *hit too long*: a hit may cover the whole request, so that no token is left to compute.
* *tokens in flight forgotten*: with two batches in flight, the second one computes the positions of the first again.
* *wrong victim*: the request that is served first loses its blocks, protected or not.
* *salt forgotten*: requests under different salts share blocks.
* *stale answer taken*: a request that takes over a row gets the token that was in flight for the one before.
* *class forgotten*: requests enter in the order of arrival, whatever their class.
* *budget overdrawn*: every chunk is as long as its prompt.
* *rows not announced*: the runner is not told which rows are free.
* *most progress lost*: of a class, the row that has computed most loses its blocks.
* *preempted without bound*: `max_preemptions` has no effect.
* *oldest evicted*: a full waiting set gives up the oldest of the best class that it may.
* *reserved class ignored*: under `fair`, a class that a tenant may not ask for takes no places of it.
* *half a group admitted*: room is looked for as if a group were one request.
* *aged to CRITICAL*: a waiting request is lifted two classes at a time.
* *place kept when lifted*: a request changes its class and not its place.
* *running never expires*: a deadline ends only those that wait.
* *children not parked*: sequences enter before their leader has computed the prompt that they share.
* *copies forgotten*: the runner is not told what to copy for forks, swaps and sessions.
* *long prompts unlimited*: one prompt takes the whole budget.
* *lower classes share*: what a long prompt leaves goes to the next request, of any class.
* *long ones share*: or however long.
* *nothing given back*: what is left of the rest of a long prompt is lost.
* *strategy ignored*: requests join a static batch that runs.
* *every deadline refused*: no request with a deadline gets in, though the engine is idle.
* *critical takes all*: every row of a lower class leaves for one CRITICAL request.
* *critical waits*: no row leaves for a CRITICAL request.
* *one victim too many*: beside those that are needed, one more leaves.
* *shared blocks counted twice*: a block that several victims share counts for each of them.
* *found blocks counted as free*: a hit takes free blocks, and they still count as free.
* *begun group evicted*: siblings of a sequence that runs lose their places.
* *half a group evicted*: its leader loses its place, and its followers stay.
* *cached prefix first for ever*: a request that has waited long is overtaken.
* *cached prefix before class*: and one of a better class.
* *cached prefix before preempted*: and a preempted request, or a sequence whose group has started.
* *rows wait for blocks*: running requests that lack blocks wait, and none leaves.
* *computed for ever*: blocks count as being computed when their row has left.
* *growth forgotten*: admission leaves no blocks for rows that grow in the same step.
* *tokens written back twice*: recent tokens stay in the row when the request has got them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from support.long_runs import examples
from support.scheduler.scheduler_machine import SchedulerMachine, crowded_machine
from tidewheel.batch import NO_TRANSFERS, ScheduledBatch
from tidewheel.errors import DeadlineExceeded, InternalError
from tidewheel.event_heap import EventHeap, TimedEvent
from tidewheel.kvcache import prefix
from tidewheel.kvcache.manager import FreedBlockCounter, KVCacheManager
from tidewheel.request import Priority, Request, RequestState
from tidewheel.scheduler import cache_pressure, planner, queue
from tidewheel.scheduler.admission import AdmissionControl
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.policy import Rank
from tidewheel.scheduler.queue import WaitingSet
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.scheduler.state import SchedulerState
from tidewheel.scheduler.step_plan import StepPlan
from tidewheel.tenants import TenantLimits

# No shrinking: that it fails is all that is asked.
SETTINGS = settings(
    max_examples=3000,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    print_blob=False,
)


def free_at_once(patch: pytest.MonkeyPatch) -> None:
    real = KVCacheManager.free
    patch.setattr(KVCacheManager, "free", lambda self, row, *, after_step=None: real(self, row))


def hash_before_commit(patch: pytest.MonkeyPatch) -> None:
    real = SchedulerState.enter

    def enter(self: SchedulerState, request: Any, hit: Any, *, keep_free: int) -> list[int] | None:
        blocks = real(self, request, hit, keep_free=keep_free)
        if blocks is not None:
            self.kv.commit(request.row, request, request.num_tokens)
        return blocks

    patch.setattr(SchedulerState, "enter", enter)


def hit_too_long(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix, "max_hit_blocks", lambda num_tokens, block_size: num_tokens // block_size)


def tokens_in_flight_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = RowColumns.gaps

    def gaps(self: RowColumns) -> Any:
        kept, self.num_inflight_tokens = self.num_inflight_tokens, np.zeros_like(self.num_inflight_tokens)
        found = real(self)
        self.num_inflight_tokens = kept
        return found

    patch.setattr(RowColumns, "gaps", gaps)


def wrong_victim(patch: pytest.MonkeyPatch) -> None:
    real = cache_pressure.order_of_victims
    patch.setattr(cache_pressure, "order_of_victims", lambda state, lowest_class: real(state, lowest_class)[::-1])
    patch.setattr(cache_pressure, "protected_row", lambda columns: -1)


def most_progress_lost(patch: pytest.MonkeyPatch) -> None:
    real = cache_pressure.order_of_victims

    def order_of_victims(state: SchedulerState, lowest_class: int) -> list[int]:
        columns = state.columns
        kept, columns.num_computed_tokens = columns.num_computed_tokens, -columns.num_computed_tokens
        rows = real(state, lowest_class)
        columns.num_computed_tokens = kept
        return rows

    patch.setattr(cache_pressure, "order_of_victims", order_of_victims)


def salt_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = prefix.root_hash
    patch.setattr(prefix, "root_hash", lambda tenant, salt: real("", ""))


def stale_answer_taken(patch: pytest.MonkeyPatch) -> None:
    real = RowColumns.enter

    def enter(self: RowColumns, request: Request, *args: Any, **kwargs: Any) -> None:
        real(self, request, *args, **kwargs)
        self.epochs[request.row] -= 1

    patch.setattr(RowColumns, "enter", enter)


def budget_overdrawn(patch: pytest.MonkeyPatch) -> None:
    real = StepPlan.add_chunk

    def add_chunk(self: StepPlan, row: int, start: int, end: int, level: Rank, *, scores: bool) -> None:
        left, self.token_budget, self.limits = self.token_budget, 999, self.limits._replace(max_chunk_tokens=999)
        real(self, row, start, end, level, scores=scores)
        self.token_budget += left - 999

    patch.setattr(StepPlan, "add_chunk", add_chunk)


def change_batches(patch: pytest.MonkeyPatch, **columns: Any) -> None:
    real = Scheduler.schedule

    def schedule(self: Scheduler, now: float) -> ScheduledBatch | None:
        batch = real(self, now)
        return None if batch is None else replace(batch, **columns)

    patch.setattr(Scheduler, "schedule", schedule)


def rows_not_announced(patch: pytest.MonkeyPatch) -> None:
    change_batches(patch, freed_rows=np.empty(0, dtype=np.int32))


def oldest_evicted(patch: pytest.MonkeyPatch) -> None:
    real = WaitingSet.displaceable
    patch.setattr(WaitingSet, "displaceable", lambda self, *newcomer: reversed(list(real(self, *newcomer))))


def reserved_class_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue, "limits_of", lambda tenants, tenant: TenantLimits())


def half_a_group_admitted(patch: pytest.MonkeyPatch) -> None:
    real = AdmissionControl.choose_evictions
    patch.setattr(
        AdmissionControl, "choose_evictions", lambda self, request, count, *rest: real(self, request, 1, *rest)
    )


def aged_to_critical(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Priority, "lifted", lambda self: Priority(max(self - 2, 1)))


def place_kept_when_lifted(patch: pytest.MonkeyPatch) -> None:
    def reclassify(self: WaitingSet, request: Request, level: Priority, *, is_overdue: bool = False) -> None:
        request.service_class = level

    patch.setattr(WaitingSet, "reclassify", reclassify)


def running_never_expires(patch: pytest.MonkeyPatch) -> None:
    real = EventHeap.pop_due

    def pop_due(self: EventHeap, now: float) -> Iterator[TimedEvent]:
        return (event for event in real(self, now) if not is_running(event.subject))

    def is_running(subject: Any) -> bool:  # sessions expire too
        return isinstance(subject, Request) and subject.state is RequestState.RUNNING

    patch.setattr(EventHeap, "pop_due", pop_due)


def children_not_parked(patch: pytest.MonkeyPatch) -> None:
    real = SchedulerState.wait

    def wait(self: SchedulerState, group: list[Request]) -> None:
        for request in group:
            real(self, [request])

    patch.setattr(SchedulerState, "wait", wait)


def copies_forgotten(patch: pytest.MonkeyPatch) -> None:
    change_batches(patch, transfers=NO_TRANSFERS)


def lower_classes_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPlan, "may_share", lambda self, level: True)


def long_ones_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPlan, "is_short", lambda self, num_missing: True)


def nothing_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPlan, "give_back", lambda self: None)


def every_deadline_refused(patch: pytest.MonkeyPatch) -> None:
    def check_deadline(control: AdmissionControl, request: Request, *rest: Any) -> None:
        if request.deadline is not None:
            raise DeadlineExceeded("too late")

    patch.setattr(AdmissionControl, "check_deadline", check_deadline)


def critical_takes_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        planner, "victims_for", lambda state, *rest, **more: cache_pressure.order_of_victims(state, Priority.HIGH)
    )


def critical_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "victims_for", lambda *rest, **more: [])


def one_victim_too_many(patch: pytest.MonkeyPatch) -> None:
    real = cache_pressure.choose_victims

    def choose_victims(state: SchedulerState, rows: list[int], num_missing: int, **more: Any) -> list[int] | None:
        chosen = real(state, rows, num_missing, **more)
        return chosen and [*chosen, *[row for row in rows if row not in chosen][:1]]

    patch.setattr(cache_pressure, "choose_victims", choose_victims)


def shared_blocks_counted_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FreedBlockCounter, "num_freed", lambda self, row: len(self._tables[row]))


def found_blocks_counted_as_free(patch: pytest.MonkeyPatch) -> None:
    def num_missing_blocks(self: KVCacheManager, num_tokens: int, hit: Any, *, keep_free: int = 0) -> int:
        return self.num_blocks_for(num_tokens) - len(hit.block_ids) + keep_free - self.num_free_blocks

    patch.setattr(KVCacheManager, "num_missing_blocks", num_missing_blocks)


def begun_group_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "is_new", property(lambda self: self.first_scheduled_time is None))


def half_a_group_evicted(patch: pytest.MonkeyPatch) -> None:
    real = AdmissionControl._evict

    def evict(self: AdmissionControl, victim: Request, *rest: Any) -> list[Request]:
        kept, victim.followers = victim.followers, []
        self._state.waiting.count(victim, -len(kept))
        gone = real(self, victim, *rest)
        victim.followers = kept
        self._state._release_followers(victim, 0.0)
        return gone

    patch.setattr(AdmissionControl, "_evict", evict)


def cached_prefix_first_for_ever(patch: pytest.MonkeyPatch) -> None:
    real = planner.next_in_line
    patch.setattr(planner, "next_in_line", lambda *rest, **more: real(*rest, **more | {"before": -1.0}))


def cached_prefix_before_class(patch: pytest.MonkeyPatch) -> None:
    def next_in_line(waiting: Iterator[Request], num_cached_tokens: Any, *, before: float, **more: Any) -> Any:
        first = next(waiting, None)
        if first is None or not first.is_new or first.arrival_time <= before:
            return first
        return max((first, *waiting), key=num_cached_tokens)

    patch.setattr(planner, "next_in_line", next_in_line)


def cached_prefix_before_preempted(patch: pytest.MonkeyPatch) -> None:
    def next_in_line(waiting: Iterator[Request], num_cached_tokens: Any, *, before: float, **more: Any) -> Any:
        first = next(waiting, None)
        if first is None or not first.is_new or first.arrival_time <= before:
            return first
        peers = (request for request in waiting if request.service_class is first.service_class)
        return max((first, *peers), key=num_cached_tokens)

    patch.setattr(planner, "next_in_line", next_in_line)


def rows_wait_for_blocks(patch: pytest.MonkeyPatch) -> None:
    def free_blocks_to_grow(state: SchedulerState, needy: np.ndarray[Any, Any], now: float) -> list[int]:
        return [int(row) for row in needy[state.kv.num_free_blocks :]]

    patch.setattr(planner, "free_blocks_to_grow", free_blocks_to_grow)


def computed_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix.PrefixCache, "drop_announced", lambda self, row, block_hashes=None: None)


def growth_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPlan, "num_blocks_kept", lambda self, num_running: 0)


def tokens_written_back_twice(patch: pytest.MonkeyPatch) -> None:
    real = RowColumns.write_back

    def write_back(self: RowColumns, row: int) -> Request:
        count = int(self.num_recent[row])
        request = real(self, row)
        self.num_recent[row] = count
        return request

    patch.setattr(RowColumns, "write_back", write_back)


def prompts_under_way_never_age(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowColumns, "is_prefilling", lambda self, row: False)


def rows_taken_that_end_anyway(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowColumns, "are_ending", lambda self: np.zeros(self.num_rows, dtype=np.bool_))


# Settings of the scheduler alone: it then breaks what driver and model expect of it.
SETTINGS_FORGOTTEN: dict[str, dict[str, Any]] = {
    "class_forgotten": {"policy": "fifo"},
    "long_prompts_unlimited": {"long_prefill_token_threshold": None},
    "strategy_ignored": {"scheduling_strategy": "continuous"},
    "preempted_without_bound": {"max_preemptions": 999},
}
MUTATIONS = (
    free_at_once, hash_before_commit, hit_too_long, tokens_in_flight_forgotten, wrong_victim, salt_forgotten,
    stale_answer_taken, budget_overdrawn, rows_not_announced, most_progress_lost, oldest_evicted,
    half_a_group_admitted, aged_to_critical, place_kept_when_lifted, running_never_expires, children_not_parked,
    copies_forgotten, lower_classes_share, long_ones_share, nothing_given_back, every_deadline_refused,
    critical_takes_all, critical_waits, one_victim_too_many, shared_blocks_counted_twice,
    found_blocks_counted_as_free, begun_group_evicted, half_a_group_evicted, cached_prefix_first_for_ever,
    cached_prefix_before_class, cached_prefix_before_preempted, rows_wait_for_blocks, computed_for_ever,
    growth_forgotten, tokens_written_back_twice, prompts_under_way_never_age, rows_taken_that_end_anyway,
    reserved_class_ignored,
)  # fmt: skip


# Machines in which these are found among fewer lives.
CROWDED = crowded_machine()
TIGHT = crowded_machine(max_num_batched_tokens=8)
MACHINES = {
    "preempted_without_bound": CROWDED,
    "one_victim_too_many": CROWDED,
    "most_progress_lost": CROWDED,
    "critical_takes_all": CROWDED,
    "critical_waits": CROWDED,
    "lower_classes_share": TIGHT,
    "long_ones_share": TIGHT,
    "reserved_class_ignored": crowded_machine(policy="fair"),
    "strategy_ignored": crowded_machine(scheduling_strategy="static", batch_size=2),
    "shared_blocks_counted_twice": crowded_machine(enable_prefix_caching=True),
    "rows_taken_that_end_anyway": crowded_machine(max_inflight_steps=2),
    "cached_prefix_first_for_ever": crowded_machine(enable_prefix_caching=True, max_num_seqs=2, ageing_s=3.0),
    "cached_prefix_before_class": crowded_machine(enable_prefix_caching=True, max_num_seqs=2),
    "cached_prefix_before_preempted": crowded_machine(enable_prefix_caching=True, max_num_seqs=3, ageing_s=1000.0),
}


@pytest.mark.parametrize("machine", dict.fromkeys([SchedulerMachine, *MACHINES.values()]))
def test_without_a_bug_it_is_content(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=examples(5, 20)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETTINGS_FORGOTTEN, *(mutate.__name__ for mutate in MUTATIONS)])
def test_the_state_machine_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MACHINES.get(name, SchedulerMachine)
    monkeypatch.setattr(machine, "bugs", SETTINGS_FORGOTTEN.get(name, {}))
    for mutate in MUTATIONS:
        if mutate.__name__ == name:
            mutate(monkeypatch)
    with pytest.raises((AssertionError, InternalError)):
        run_state_machine_as_test(machine, settings=SETTINGS)
