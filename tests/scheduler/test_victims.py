"""Who leaves: victims, their protection, and what a waiting CRITICAL takes."""

from __future__ import annotations

import pytest

from support.engine.fake_runner import naive_output
from support.scheduler.scheduling import SchedulerDriver, make_request, make_scheduler, numbered
from tidewheel.kvcache.prefix import PrefixHit
from tidewheel.request import Priority, Request, RequestState
from tidewheel.scheduler import cache_pressure
from tidewheel.scheduler.cache_pressure import order_of_victims, protected_row
from tidewheel.scheduler.state import SchedulerState

CRITICAL, HIGH, NORMAL, LOW = Priority


def state_with(*rows: tuple[int, int, float, int], max_preemptions: int = 4) -> SchedulerState:
    """Class, computed tokens, arrival and preemptions of each row."""
    state = make_scheduler(max_num_seqs=len(rows), max_preemptions=max_preemptions)._state
    for number, (level, computed, arrival, num_preemptions) in enumerate(rows):
        request = numbered(make_request(f"r{number}", max_tokens=100, arrival_time=arrival), number)
        request.num_preemptions = num_preemptions
        state.columns.enter(request, PrefixHit((), computed), computed, 1, level)
    return state


def victim(state: SchedulerState, *, lowest_class: int = 1) -> int | None:
    """The row that a growing one takes first."""
    rows = order_of_victims(state, lowest_class)
    return next((row for row in rows if row != protected_row(state.columns)), None)


def test_the_lowest_class_goes_first_then_the_least_progress_then_the_youngest() -> None:
    assert victim(state_with((1, 0, 0.0, 0), (3, 1, 1.0, 0), (4, 90, 2.0, 0))) == 2
    assert victim(state_with((3, 0, 0.0, 0), (3, 9, 1.0, 0), (3, 5, 2.0, 0))) == 2
    assert victim(state_with((3, 0, 0.0, 0), (3, 5, 1.0, 0), (3, 5, 2.0, 0))) == 2
    assert victim(state_with((3, 0, 0.0, 0), (3, 5, 1.0, 0), (3, 5, 1.0, 0))) == 2


def test_the_oldest_of_the_highest_class_is_protected_whatever_it_has() -> None:
    state = state_with((4, 90, 0.0, 0), (2, 0, 5.0, 0), (2, 0, 3.0, 0))
    assert protected_row(state.columns) == 2
    assert victim(state_with((3, 0, 0.0, 0))) is None
    assert victim(state_with((3, 0, 0.0, 9), (3, 50, 1.0, 0))) == 1


def test_who_was_preempted_often_enough_goes_last() -> None:
    rows = ((1, 0, 0.0, 0), (4, 1, 1.0, 4), (2, 90, 2.0, 3))
    assert victim(state_with(*rows)) == 2
    assert victim(state_with(*rows, max_preemptions=5)) == 1
    assert victim(state_with((1, 0, 0.0, 0), (4, 1, 1.0, 4), (4, 2, 2.0, 5))) == 1


def test_nobody_of_a_better_class_than_asked_for_is_taken() -> None:
    state = state_with((1, 0, 0.0, 0), (2, 1, 1.0, 0), (3, 90, 2.0, 4))
    assert victim(state, lowest_class=3) == 2
    assert victim(state, lowest_class=4) is None


def test_preemptions_of_one_request_are_bounded_while_others_can_be_taken() -> None:
    driver = SchedulerDriver(
        num_blocks=10, block_size=2, max_num_seqs=5, max_num_batched_tokens=64, max_preemptions=1, ageing_s=999.0
    )
    for number in range(5):
        driver.add(make_request(f"r{number}", prompt=[number] * 2, max_tokens=12, arrival_time=float(number)))
    driver.run()
    num_preemptions = [request.num_preemptions for request in driver.requests.values()]
    assert num_preemptions[0] == 0 and sum(num_preemptions) > 0


def fill_rows(driver: SchedulerDriver, *levels: Priority, max_tokens: int = 30) -> list[Request]:
    requests = [
        driver.add(
            make_request(f"r{n}", prompt=[n] * 4, max_tokens=max_tokens, priority=level, arrival_time=float(n))
        )
        for n, level in enumerate(levels)
    ]
    driver.step()
    assert all(request.state is RequestState.RUNNING for request in requests)
    return requests


@pytest.mark.parametrize("max_inflight_steps", [1, 2])
def test_a_waiting_critical_takes_the_row_of_a_lower_class(max_inflight_steps: int) -> None:
    driver = SchedulerDriver(
        max_num_seqs=3, max_num_batched_tokens=64, max_inflight_steps=max_inflight_steps, num_blocks=64
    )
    requests = fill_rows(driver, NORMAL, LOW, LOW)
    critical = driver.add(make_request("critical", prompt=[9] * 4, max_tokens=2, priority=CRITICAL))
    driver.schedule()
    assert critical.state is RequestState.RUNNING
    assert [request.num_preemptions for request in requests] == [0, 0, 1]
    driver.apply()
    driver.run()
    assert all(request.output_token_ids == naive_output(request)[0] for request in requests)


def test_a_waiting_critical_takes_blocks_of_lower_classes() -> None:
    driver = SchedulerDriver(num_blocks=12, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    requests = fill_rows(driver, HIGH, LOW, NORMAL, max_tokens=8)
    wide = driver.add(make_request("wide", prompt=[9] * 30, max_tokens=2, priority=CRITICAL))
    driver.step()
    assert wide.first_scheduled_time is not None
    assert [request.num_preemptions for request in requests] == [0, 1, 0]
    driver.run()


def victims_of_critical(driver: SchedulerDriver, num_prompt_tokens: int) -> list[str]:
    """Ids of requests that leave for a CRITICAL, in the step in which it arrives."""
    prompt = [9] * num_prompt_tokens
    critical = driver.add(make_request("critical", prompt, max_tokens=1, priority=CRITICAL, arrival_time=9.0))
    driver.schedule()
    assert critical.state is RequestState.RUNNING
    driver.apply()
    return [name for name, request in driver.requests.items() if request.state is RequestState.PREEMPTED]


def fill_blocks(driver: SchedulerDriver, lengths: dict[str, int], num_preemptions: int = 0) -> None:
    """Prompts of LOW requests, after their first token. The last one was preempted so often."""
    for number, (name, length) in enumerate(lengths.items()):
        request = make_request(name, [number] * length, max_tokens=8, priority=LOW, arrival_time=float(number))
        driver.add(request)
    request.num_preemptions = num_preemptions
    driver.step()
    assert len(driver.prefilling()) == 0 and driver.scheduler.num_running == len(lengths)


def test_a_row_that_leaves_alone_saves_the_block_into_which_it_would_grow() -> None:
    """Two blocks are missing: `full` holds one and needs the next, `wide` holds two and has computed more."""
    driver = SchedulerDriver(num_blocks=6, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    fill_blocks(driver, {"full": 4, "wide": 6})
    assert victims_of_critical(driver, 16) == ["full"]
    driver.run()


def test_no_other_class_takes_rows() -> None:
    driver = SchedulerDriver(max_num_seqs=2, max_num_batched_tokens=64)
    requests = fill_rows(driver, LOW, LOW)
    high = driver.add(make_request("high", priority=HIGH))
    driver.step()
    assert high.state is RequestState.WAITING and not any(request.num_preemptions for request in requests)
    driver.run()


def test_a_critical_takes_nothing_from_its_own_class() -> None:
    driver = SchedulerDriver(max_num_seqs=2, max_num_batched_tokens=64)
    requests = fill_rows(driver, CRITICAL, CRITICAL)
    driver.add(make_request("critical", priority=CRITICAL, arrival_time=9.0))
    driver.step()
    assert not any(request.num_preemptions for request in requests)
    driver.run()


def test_a_lone_row_gives_way_to_a_critical_at_once() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    only = fill_rows(driver, LOW)[0]
    critical = driver.add(make_request("critical", priority=CRITICAL))
    driver.schedule()
    assert critical.state is RequestState.RUNNING and only.num_preemptions == 1
    driver.apply()
    driver.run()
    assert only.num_preemptions == 1


def test_nobody_is_preempted_for_a_critical_that_would_not_fit_even_then() -> None:
    driver = SchedulerDriver(num_blocks=12, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    holder = driver.add(make_request("holder", prompt=[7] * 24, max_tokens=4, priority=CRITICAL))
    low = driver.add(make_request("low", prompt=[1] * 4, max_tokens=4, priority=LOW))
    driver.step()
    wide = driver.add(make_request("wide", prompt=[9] * 40, max_tokens=2, priority=CRITICAL, arrival_time=5.0))
    driver.step()
    assert (holder.num_preemptions, low.num_preemptions) == (0, 0) and wide.state is RequestState.WAITING
    driver.run()


@pytest.mark.parametrize("changes", [{"policy": "fifo"}, {"scheduling_strategy": "static", "batch_size": 2}])
def test_where_it_may_not_join_a_critical_preempts_nobody(changes: dict[str, object]) -> None:
    driver = SchedulerDriver(max_num_seqs=2, max_num_batched_tokens=64, **changes)
    requests = fill_rows(driver, LOW, LOW)
    driver.add(make_request("critical", priority=CRITICAL, arrival_time=9.0))
    driver.step()
    assert not any(request.num_preemptions for request in requests)
    driver.run()


def test_several_criticals_enter_in_one_step() -> None:
    driver = SchedulerDriver(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=64)
    fill_rows(driver, LOW, LOW, LOW, LOW)
    for number in range(3):
        driver.add(make_request(f"c{number}", prompt=[9, number], priority=CRITICAL, arrival_time=9.0 + number))
    driver.schedule()
    assert all(driver.requests[f"c{number}"].state is RequestState.RUNNING for number in range(3))
    driver.apply()
    driver.run()


def test_a_critical_enters_although_decodes_take_the_whole_budget() -> None:
    driver = SchedulerDriver(max_num_seqs=4, max_num_batched_tokens=4, num_blocks=64)
    requests = [driver.add(make_request(f"r{n}", prompt=[n], max_tokens=30, priority=LOW)) for n in range(4)]
    while any(not driver.delivered[request.request_id] for request in requests):
        driver.step()
    critical = driver.add(make_request("critical", prompt=[9] * 3, max_tokens=1, priority=CRITICAL))
    driver.schedule()
    assert critical.state is RequestState.RUNNING
    assert sum(request.num_preemptions for request in requests) == 1
    driver.apply()
    driver.run()


def test_no_row_leaves_for_a_critical_while_one_ends_with_a_token_in_flight() -> None:
    driver = SchedulerDriver(max_num_seqs=2, max_num_batched_tokens=64, max_inflight_steps=2)
    long = driver.add(make_request("long", prompt=[1] * 4, max_tokens=30, priority=LOW))
    short = driver.add(make_request("short", prompt=[2] * 4, max_tokens=2, priority=LOW))
    driver.schedule()
    driver.schedule()
    critical = driver.add(make_request("critical", prompt=[9] * 4, max_tokens=2, priority=CRITICAL))
    driver.apply()
    driver.schedule()
    assert (long.num_preemptions, short.num_preemptions) == (0, 0)
    driver.apply()
    assert short.is_finished
    driver.schedule()
    assert critical.state is RequestState.RUNNING and long.num_preemptions == 0
    driver.run()


def test_no_row_leaves_for_a_block_while_one_that_ends_gives_it_back() -> None:
    driver = SchedulerDriver(
        num_blocks=3, block_size=4, max_num_seqs=2, max_num_batched_tokens=64, max_inflight_steps=2
    )
    growing = driver.add(make_request("growing", prompt=[1] * 3, max_tokens=6))
    ending = driver.add(make_request("ending", prompt=[2] * 4, max_tokens=2, arrival_time=1.0))
    driver.run()
    assert (growing.num_preemptions, ending.num_preemptions) == (0, 0)
    assert growing.output_token_ids == naive_output(growing)[0]


def test_blocks_that_a_staying_row_shares_are_not_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that share the prefix of a CRITICAL can free little: that is seen without a look at their tables."""
    driver = SchedulerDriver(num_blocks=24, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    driver.add(make_request("holder", prompt=[*range(40), 0], max_tokens=8, priority=CRITICAL))
    driver.step()
    for n in range(4):
        driver.add(make_request(f"low{n}", prompt=[*range(40), n], max_tokens=8, priority=LOW, arrival_time=1.0))
    driver.step()
    assert driver.scheduler.num_running == 5
    monkeypatch.setattr(cache_pressure, "choose_victims", None)
    wide = driver.add(make_request("wide", prompt=[39] * 60, max_tokens=1, priority=CRITICAL, arrival_time=9.0))
    driver.step()
    assert wide.state is RequestState.WAITING
    driver.cancel("wide")
    driver.run()


def swapping_driver(**changes: object) -> SchedulerDriver:
    return SchedulerDriver(num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=64, **changes)


@pytest.mark.parametrize("max_inflight_steps", [1, 2])
@pytest.mark.parametrize(("mode", "num_host_blocks"), [("swap", 16), ("swap", 2), ("recompute", 16), ("auto", 16)])
def test_output_survives_a_swap(mode: str, num_host_blocks: int, max_inflight_steps: int) -> None:
    driver = swapping_driver(
        preemption_mode=mode, num_host_blocks=num_host_blocks, max_inflight_steps=max_inflight_steps
    )
    requests = [driver.add(make_request(f"r{n}", prompt=[n] * 4, max_tokens=12)) for n in range(6)]
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swap_preemptions > 0) == (mode == "swap")
    assert (stats.num_swapped_out > 0) == (mode == "swap")
    assert all(request.output_token_ids == naive_output(request)[0] for request in requests)


def test_the_cheaper_way_back_is_chosen_once_the_cost_is_known() -> None:
    """The driver's steps take a second whatever is in them; here the prompts cost a second a token."""
    driver = swapping_driver(num_host_blocks=16, swap_seconds_per_block=0.001)
    for n in range(12):
        driver.add(make_request(f"r{n}", prompt=[n] * (1 + n % 5), max_tokens=10))
    while driver.scheduler.has_unfinished:
        batch = driver.schedule()
        if batch is not None:
            driver.now += float(batch.num_tokens - batch.num_decodes)
        if driver.in_flight:
            driver.apply()
    assert driver.scheduler.stats().num_swap_preemptions > 0
