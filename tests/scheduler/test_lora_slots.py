"""Slots of adapters: who gets one, when, and what waits meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.batch import ScheduledBatch
from tidewheel.errors import InternalError, InvalidRequest
from tidewheel.lora import NO_SLOT, Lora
from tidewheel.request import FinishReason, Priority, Request, RequestState
from tidewheel.scheduler.admission import MAX_LORA_LABELS, OTHERS

AGEING_S = 10.0


class Adapters:
    """Adapters by name, whose weights a test's loader brings at once, later or never."""

    def __init__(self, driver: SchedulerDriver, *, is_lazy: bool = False) -> None:
        self.asked: list[Lora] = []
        self.is_lazy = is_lazy
        self._loras: dict[str, Lora] = {}
        driver.scheduler.loras.load = self.load

    def __getitem__(self, name: str) -> Lora:
        return self._loras.setdefault(name, Lora(name, len(self._loras), Path(name)))

    def load(self, lora: Lora) -> None:
        self.asked.append(lora)
        if not self.is_lazy:
            lora.weights = lora.name

    def finish(self, *names: str) -> None:
        for name in names:
            self[name].weights = name


def make_driver(max_loras: int = 1, **changes: Any) -> SchedulerDriver:
    return SchedulerDriver(num_blocks=128, max_loras=max_loras, ageing_s=AGEING_S, **changes)


def add(driver: SchedulerDriver, request_id: str, lora: Lora | None, **fields: Any) -> Request:
    fields = {"arrival_time": driver.now, "max_tokens": 40, **fields}
    return driver.add(make_request(request_id, lora=lora, cache_salt="" if lora is None else lora.name, **fields))


def steps_until(driver: SchedulerDriver, request: Request, most: int = 100) -> float:
    """Step until the request runs. Return the seconds that took."""
    begin = driver.now
    for _ in range(most):
        driver.step()
        if request.state is RequestState.RUNNING:
            return driver.now - begin
    raise AssertionError(f"{request} does not run")


def scheduled(driver: SchedulerDriver) -> ScheduledBatch:
    batch = driver.schedule()
    assert batch is not None
    return batch


def test_a_batch_names_the_slots_of_its_rows_and_loads_an_adapter_once() -> None:
    driver = make_driver(2)
    adapters = Adapters(driver)
    for name, lora in (("a1", adapters["a"]), ("base", None), ("b1", adapters["b"]), ("a2", adapters["a"])):
        add(driver, name, lora)
    batch = scheduled(driver)
    slots = {load.lora.name: load.slot for load in batch.lora_loads}
    assert sorted(slots) == ["a", "b"] and sorted(slots.values()) == [0, 1]
    names = [new.request.request_id for new in batch.new_rows]
    of_rows = dict(zip(names, batch.lora_slots.tolist(), strict=True))
    assert batch.lora_slots.dtype == np.int32
    assert of_rows == {"a1": slots["a"], "base": NO_SLOT, "b1": slots["b"], "a2": slots["a"]}
    driver.apply()
    later = scheduled(driver)
    assert later.lora_loads == () and sorted(later.lora_slots.tolist()) == sorted(batch.lora_slots.tolist())


def test_a_batch_without_adapters_has_no_column() -> None:
    driver = make_driver(2)
    add(driver, "base", None)
    batch = scheduled(driver)
    assert len(batch.lora_slots) == 0 and batch.lora_loads == ()


def test_a_request_waits_for_weights_and_no_other_waits_for_it() -> None:
    driver = make_driver(2)
    adapters = Adapters(driver, is_lazy=True)
    slow = add(driver, "slow", adapters["slow"])
    base = add(driver, "base", None)
    adapters.finish("quick")
    quick = add(driver, "quick", adapters["quick"])
    driver.step()
    assert (slow.state, base.state, quick.state) == (
        RequestState.WAITING,
        RequestState.RUNNING,
        RequestState.RUNNING,
    )
    driver.step()
    assert adapters.asked == [adapters["slow"]] * 2, "a loader that was full is asked again"
    adapters.finish("slow")
    driver.step()
    assert slow.state is RequestState.RUNNING


def test_many_requests_of_a_waiting_adapter_hide_no_other() -> None:
    driver = make_driver(2)
    adapters = Adapters(driver, is_lazy=True)
    for number in range(50):
        add(driver, f"slow{number}", adapters["slow"])
    adapters.finish("quick")
    quick, base = add(driver, "quick", adapters["quick"]), add(driver, "base", None)
    driver.step()
    assert quick.state is base.state is RequestState.RUNNING


def test_weights_are_asked_for_while_no_row_is_free_and_of_few_adapters() -> None:
    driver = make_driver(2, max_num_seqs=1)
    adapters = Adapters(driver, is_lazy=True)
    add(driver, "base", None)
    driver.step()
    for number in range(5):
        add(driver, f"r{number}", adapters[str(number)])
    driver.step()
    assert [lora.name for lora in adapters.asked] == ["0", "1"]


def test_an_idle_adapter_gives_its_slot_to_the_next_the_longest_unused_first() -> None:
    driver = make_driver(2)
    adapters = Adapters(driver)
    for name in ("a", "b", "a", "c"):
        add(driver, f"{name}{driver.now}", adapters[name], max_tokens=2)
        driver.run()
    assert {load.lora.name for load in driver.scheduler.loras.contents} == {"a", "c"}
    stats = driver.scheduler.stats()
    assert (stats.num_lora_slots, stats.num_lora_loads, stats.num_lora_evictions) == (2, 3, 1)


def test_an_adapter_stays_in_its_slot_without_its_weights() -> None:
    driver = make_driver(1)
    adapters = Adapters(driver)
    add(driver, "one", adapters["a"], max_tokens=2)
    driver.run()
    adapters["a"].weights = None
    add(driver, "two", adapters["a"], max_tokens=2)
    assert scheduled(driver).lora_loads == ()
    assert len(adapters.asked) == 1


def test_a_failed_load_ends_the_requests_of_its_adapter() -> None:
    driver = make_driver(1)
    adapters = Adapters(driver, is_lazy=True)
    bad = adapters["bad"]
    lone = add(driver, "lone", bad)
    leader, base = make_request("leader", lora=bad), add(driver, "base", None)
    group = [leader, *(make_request(f"f{number}", lora=bad, leader=leader) for number in range(2))]
    driver.add_group(group)
    driver.step()
    bad.error = InvalidRequest("rank 512 is more than 16")
    driver.schedule()
    for request in (lone, *group):
        assert request.error is bad.error and request.finish_reason is FinishReason.ERROR
    assert base.state is RequestState.RUNNING


def test_a_waiting_adapter_reserves_a_slot_and_then_takes_it() -> None:
    driver = make_driver(1, max_num_seqs=8)
    adapters = Adapters(driver)
    first = add(driver, "a0", adapters["a"], max_tokens=100)
    driver.step()
    other = add(driver, "b0", adapters["b"])
    begin, entered = driver.now, []
    for number in range(1, 40):
        if other.state is RequestState.RUNNING:
            break
        add(driver, f"a{number}", adapters["a"], max_tokens=100)
        driver.step()
        entered.append((driver.now - begin, driver.scheduler.num_running))
    assert other.first_scheduled_time is not None
    assert 2 * AGEING_S <= other.first_scheduled_time - begin <= 2 * AGEING_S + 2.0
    assert first.state is RequestState.PREEMPTED
    before = [count for at, count in entered if at <= AGEING_S]
    after = [count for at, count in entered if at > AGEING_S + 2.0]
    assert before[-1] > before[0] and len(set(after[:-1])) == 1, "the adapter in the slot gets no new rows"


def test_a_drained_slot_goes_to_the_one_that_reserved_it_early() -> None:
    driver = make_driver(1, max_num_seqs=8)
    adapters = Adapters(driver)
    add(driver, "a0", adapters["a"], max_tokens=8)
    driver.step()
    other = add(driver, "b0", adapters["b"])
    for number in range(1, 12):
        add(driver, f"a{number}", adapters["a"], max_tokens=3)
        driver.step()
    assert AGEING_S <= steps_until(driver, other) + 22.0 < 2 * AGEING_S + 20.0
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_critical_request_takes_a_slot_from_lower_classes_at_once() -> None:
    driver = make_driver(1, max_num_seqs=8)
    adapters = Adapters(driver)
    low = [add(driver, f"a{number}", adapters["a"]) for number in range(2)]
    driver.step()
    critical = add(driver, "c", adapters["c"], priority=Priority.CRITICAL)
    assert steps_until(driver, critical) <= 4.0
    assert {request.state for request in low} == {RequestState.PREEMPTED}


def test_a_critical_request_takes_no_slot_from_critical_requests() -> None:
    driver = make_driver(1, max_num_seqs=8)
    adapters = Adapters(driver)
    first = add(driver, "a", adapters["a"], priority=Priority.CRITICAL, max_tokens=8)
    driver.step()
    second = add(driver, "b", adapters["b"], priority=Priority.CRITICAL)
    steps_until(driver, second)
    assert first.finish_reason is FinishReason.LENGTH


def test_a_better_class_closes_a_slot_to_lower_classes_at_once() -> None:
    driver = make_driver(1, max_num_seqs=8)
    adapters = Adapters(driver)
    add(driver, "a0", adapters["a"], max_tokens=3)
    driver.step()
    high = add(driver, "high", adapters["b"], priority=Priority.HIGH)
    normal = add(driver, "a1", adapters["a"])
    steps_until(driver, high)
    assert normal.first_scheduled_time is None and driver.scheduler.stats().num_preemptions == 0


def test_rows_of_a_better_class_keep_their_slot() -> None:
    driver = make_driver(1, max_num_seqs=8)
    adapters = Adapters(driver)
    critical = add(driver, "a", adapters["a"], priority=Priority.CRITICAL, max_tokens=60)
    driver.step()
    normal = add(driver, "b", adapters["b"])
    steps_until(driver, normal)
    assert critical.finish_reason is FinishReason.LENGTH


def test_followers_enter_a_slot_that_another_adapter_has_reserved() -> None:
    driver = make_driver(1, max_num_seqs=8, max_num_batched_tokens=4)
    adapters = Adapters(driver)
    leader = make_request("leader", 28, max_tokens=40, lora=adapters["a"], cache_salt="a")
    follower = make_request("follower", 28, max_tokens=40, lora=adapters["a"], cache_salt="a", leader=leader)
    driver.add_group([leader, follower])
    other = add(driver, "b", adapters["b"])
    steps_until(driver, follower)
    assert driver.now > AGEING_S and other.state is RequestState.WAITING
    steps_until(driver, other)


def test_slots_of_a_step_that_did_not_run_are_empty() -> None:
    driver = make_driver(1)
    adapters = Adapters(driver)
    add(driver, "a", adapters["a"])
    driver.step()
    driver.fail_all(InternalError("the device is lost"))
    assert driver.scheduler.loras.contents == []
    check_invariants(driver.scheduler)


@pytest.mark.parametrize("num_adapters", [2, 5, 9])
@pytest.mark.parametrize("max_loras", [1, 2, 4])
def test_every_adapter_of_an_overload_gets_its_turns(max_loras: int, num_adapters: int) -> None:
    """Check that k others before an adapter cost it at most (2 + k / slots) · ageing_s."""
    driver = make_driver(max_loras, max_num_seqs=32, max_num_batched_tokens=64, max_waiting_requests=256)
    adapters = Adapters(driver)
    waits: list[float] = []
    waiting: dict[str, Request] = {}
    number = 0
    while driver.now < 40 * AGEING_S:
        for name in map(str, range(num_adapters)):
            request = waiting.get(name)
            if request is None or request.first_scheduled_time is not None:
                if request is not None and request.first_scheduled_time is not None:
                    waits.append(request.first_scheduled_time - request.arrival_time)
                waiting[name] = add(driver, f"{name}-{number}", adapters[name], max_tokens=12)
                number += 1
        driver.step()
        check_invariants(driver.scheduler)
    waits += [driver.now - one.arrival_time for one in waiting.values() if one.first_scheduled_time is None]
    assert max(waits) <= (2 + (num_adapters - 1) // max_loras) * AGEING_S + 4.0


def test_a_request_of_the_same_look_reserves_no_slot_of_one_that_may_enter() -> None:
    """In the order by cached prefixes, later requests are looked at before the first enters."""
    driver = make_driver(cache_aware_order=True)
    adapters = Adapters(driver)
    running = add(driver, "running", adapters["a"], max_tokens=4)
    driver.step()
    add(driver, "old", adapters["c"], priority=Priority.LOW)
    driver.step()
    first = add(driver, "first", adapters["b"], priority=Priority.HIGH)  # reserves the slot at once
    while running.state is RequestState.RUNNING:
        driver.step()
    assert first.state is RequestState.WAITING
    add(driver, "later", adapters["c"], priority=Priority.HIGH)  # its adapter has waited longer
    driver.step()
    check_invariants(driver.scheduler)
    assert first.state is RequestState.RUNNING


def test_a_request_that_entered_another_slot_reserves_none() -> None:
    driver = make_driver(2)
    adapters = Adapters(driver)
    add(driver, "low", adapters["a"], priority=Priority.LOW)
    running = add(driver, "running", adapters["b"], priority=Priority.HIGH, max_tokens=4)
    driver.step()
    first = add(driver, "first", adapters["c"], priority=Priority.HIGH)  # reserves the slot of "low" at once
    while running.state is RequestState.RUNNING:
        driver.step()
    assert first.state is RequestState.WAITING
    add(driver, "second", adapters["d"], priority=Priority.HIGH)
    driver.step()
    check_invariants(driver.scheduler)
    assert first.state is RequestState.RUNNING


def test_an_idle_slot_that_another_reserved_is_taken_in_the_same_step_by_a_better_class() -> None:
    driver = make_driver()
    loras = Adapters(driver)
    first = add(driver, "a", loras["a"], max_tokens=7)
    waiting = add(driver, "b", loras["b"])
    while not first.is_finished:
        driver.step()
    assert driver.scheduler.loras._slots[0].reserved_for is waiting
    better = add(driver, "c", loras["c"], priority=Priority.CRITICAL)
    driver.step()
    assert better.state is RequestState.RUNNING


def test_the_adapters_used_first_have_labels_of_their_own() -> None:
    driver = make_driver()
    loras = Adapters(driver)
    names = [f"sql/{number}" for number in range(MAX_LORA_LABELS + 2)]
    for name in (*names, names[0]):
        add(driver, f"r{len(driver.requests)}", loras[name], max_tokens=1)
        driver.run()
    figures = driver.scheduler.stats().loras
    assert list(figures) == [*(name.replace("/", "_") for name in names[:MAX_LORA_LABELS]), OTHERS]
    assert (figures["sql_0"].num_requests, figures["sql_1"].num_requests, figures[OTHERS].num_requests) == (2, 1, 2)
