"""Promises under hostile load: deadlines, room for CRITICAL, groups, and the return of preempted requests.

Time is passed in: a step takes as long as the test says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from support.engine.fake_runner import naive_output
from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.errors import Busy, DeadlineExceeded
from tidewheel.request import FinishReason, Priority, Request, RequestState
from tidewheel.tenants import TenantLimits

CRITICAL, HIGH, NORMAL, LOW = Priority
WAITING, RUNNING, PREEMPTED = RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED


# --- deadlines ----------------------------------------------------------------------------------------------------


def timed_driver(**changes: object) -> SchedulerDriver:
    """A driver whose steps take no time but what `step_for` gives them."""
    settings = {
        "num_blocks": 4096, "block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 256,
        "max_model_len": 8192, "max_waiting_requests": 8192, "max_waiting_tokens": 1 << 22,
    }  # fmt: skip
    driver = SchedulerDriver(**(settings | changes))
    driver.tick = 0.0
    return driver


def step_for(driver: SchedulerDriver, seconds: float) -> None:
    driver.schedule()
    driver.now += seconds
    if driver.in_flight:
        driver.apply()


def drain(driver: SchedulerDriver, seconds: float) -> None:
    """Steps of so many seconds until nothing is left."""
    while driver.scheduler.has_unfinished:
        step_for(driver, seconds)


def arrive(
    driver: SchedulerDriver, name: str, prompt: object = 2, *, within: float | None = None, **fields: object
) -> Request:
    """A request that arrives now, with a deadline so many seconds later."""
    deadline = None if within is None else driver.now + within
    return driver.add(make_request(name, prompt, arrival_time=driver.now, deadline=deadline, **fields))


def is_refused(driver: SchedulerDriver, name: str, prompt: list[int], *, within: float) -> bool:
    try:
        arrive(driver, name, prompt, within=within, max_tokens=1)
    except DeadlineExceeded:
        return True
    return False


def test_one_slow_first_step_refuses_nothing_on_an_idle_engine() -> None:
    driver = timed_driver()
    arrive(driver, "first", max_tokens=1)
    drain(driver, 3.0)
    for number in range(10_000):
        driver.now += 0.01
        arrive(driver, f"r{number}", within=2.0, max_tokens=1)
        driver.cancel(f"r{number}")
    assert driver.scheduler.stats().num_hopeless == 0


def test_a_backlog_of_six_hours_ago_refuses_nothing_while_rows_are_free() -> None:
    driver = timed_driver(max_num_seqs=4)
    for number in range(240):
        arrive(driver, f"old{number}", prompt=[number % 40] * 20, max_tokens=1)
    drain(driver, 1.0)
    assert driver.now >= 60.0
    driver.now += 6 * 3600.0
    names = count()
    refused = 0
    for _ in range(250):
        refused += sum(is_refused(driver, f"r{next(names)}", [7] * 100, within=2.0) for _ in range(4))
        drain(driver, 0.005)
        driver.now += 1.0
    assert refused == 0


def slow_at_prompts(driver: SchedulerDriver) -> list[int]:
    """Teaches that a prompt token takes 10 ms and a step without one 1 ms; a prompt that is cached now."""
    prompt = [number % 37 for number in range(2048)]
    arrive(driver, "teacher", prompt, max_tokens=1)
    while driver.scheduler.has_unfinished:
        step_for(driver, 2.56)
    for number in range(1, 11):
        arrive(driver, f"short{number}", [39, number] * number, max_tokens=2)
        step_for(driver, 0.001 + 0.02 * number)
        drain(driver, 0.001)
    return prompt


def test_a_cached_prompt_keeps_a_deadline_that_a_cold_one_of_its_length_cannot() -> None:
    driver = timed_driver()
    cached = slow_at_prompts(driver)
    arrive(driver, "busy", [38, 38, 38], max_tokens=64)
    step_for(driver, 0.031)
    arrive(driver, "ahead", [38])
    assert is_refused(driver, "cold", [1, *cached[1:]], within=1.0), "20 s of work within 1 s"
    arrive(driver, "warm", cached, within=1.0, max_tokens=1)
    step_for(driver, 0.2)
    assert driver.requests["warm"].finish_reason is FinishReason.LENGTH


def after_a_slow_step(driver: SchedulerDriver) -> None:
    arrive(driver, "slow", max_tokens=1)
    drain(driver, 30.0)


def after_a_backlog(driver: SchedulerDriver) -> None:
    for number in range(300):
        arrive(driver, f"old{number}", prompt=[number % 40] * 20, max_tokens=1)
    drain(driver, 1.0)


def after_missed_deadlines(driver: SchedulerDriver) -> None:
    after_a_slow_step(driver)
    for number in range(100):
        arrive(driver, f"late{number}", within=100.0)
    driver.now += 101.0
    assert len(driver.expire()) == 100


def after_slow_prompts(driver: SchedulerDriver) -> None:
    slow_at_prompts(driver)


@pytest.mark.parametrize(
    "history",
    [after_a_slow_step, after_a_backlog, after_missed_deadlines, after_slow_prompts],
    ids=lambda f: f.__name__,
)
def test_an_engine_with_nothing_to_do_refuses_no_deadline(history: Callable[[SchedulerDriver], None]) -> None:
    driver = timed_driver()
    history(driver)
    assert not driver.scheduler.has_unfinished
    assert not is_refused(driver, "short", [1, 2], within=0.001)
    driver.cancel("short")
    assert not is_refused(driver, "long", [3] * 4000, within=1.0)


@pytest.mark.parametrize("seconds", [(3.5,), (0.6, 3.5), (0.01, 3.5, 0.01, 0.01)], ids=str)
def test_a_stall_in_an_early_step_refuses_nothing_after_six_idle_seconds(seconds: tuple[float, ...]) -> None:
    driver = timed_driver()
    arrive(driver, "early", [5, 6, 7], max_tokens=len(seconds))
    for duration in seconds:
        step_for(driver, duration)
    assert driver.requests["early"].is_finished
    driver.now += 6.0
    refused = [is_refused(driver, f"r{number}", [number, number + 1], within=2.0) for number in range(20)]
    assert sum(refused) == 0


def test_a_deadline_that_a_measured_backlog_makes_impossible_is_refused() -> None:
    """10,000 tokens wait ahead, every row is taken, and 100 tokens a second start."""
    driver = timed_driver(max_num_seqs=4, max_num_batched_tokens=1024)
    for number in range(144):
        arrive(driver, f"r{number}", prompt=[number, *[number % 40] * 99], max_tokens=4)
    for _ in range(41):  # every fourth step four prompts of 100 tokens start
        step_for(driver, 1.0)
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting_tokens) == (4, 10_000)
    with pytest.raises(DeadlineExceeded, match="first token is expected"):
        arrive(driver, "hopeless", within=2.0)
    after = driver.scheduler.stats()
    assert after == replace(stats, num_hopeless=1, tenants=after.tenants)
    arrive(driver, "patient", within=1000.0)
    arrive(driver, "critical", within=2.0, priority=CRITICAL)


# --- room for CRITICAL --------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Blocks and rows before a step, to judge its victims by."""

    tables: dict[str, set[int]]  # by id of a running request
    num_free_blocks: int
    num_free_rows: int


def held_by(driver: SchedulerDriver, max_running: int) -> Held:
    running = [r for r in driver.requests.values() if r.state is RUNNING]
    tables = {r.request_id: set(driver.kv.block_table(r.row)) for r in running}
    return Held(tables, driver.kv.num_free_blocks, max_running - len(running))


def is_enough(held: Held, victims: Iterable[str], num_blocks: int) -> bool:
    """Do the victims leave a row and so many blocks? A block is free when nobody else has it."""
    leaving = set(victims)
    kept = set().union(*(blocks for name, blocks in held.tables.items() if name not in leaving))
    freed = set().union(*(held.tables[name] for name in leaving)) - kept
    return held.num_free_blocks + len(freed) >= num_blocks and held.num_free_rows + len(leaving) >= 1


def check_victims(driver: SchedulerDriver, held: Held, newcomer: Request, num_blocks: int) -> list[str]:
    """Either nobody was preempted, or the newcomer has entered and each victim was needed; their ids."""
    victims = [name for name in held.tables if driver.requests[name].num_preemptions]
    if victims:
        assert newcomer.state is RUNNING, f"{len(victims)} were preempted in vain"
    for name in victims:
        assert not is_enough(held, set(victims) - {name}, num_blocks), f"{name} was preempted without need"
    return victims


def fill(driver: SchedulerDriver, number: int, *, priority: Priority = LOW, **fields: object) -> list[Request]:
    """Running requests with different prompts of one block."""
    fields = {"max_tokens": 60, **fields}
    requests = [
        driver.add(make_request(f"low{n}", [n, n, n], priority=priority, arrival_time=float(n), **fields))
        for n in range(number)
    ]
    driver.step()
    assert all(request.state is RUNNING for request in requests)
    return requests


def test_a_lowered_limit_costs_one_row_for_a_critical() -> None:
    driver = SchedulerDriver(
        num_blocks=4096, block_size=16, max_num_seqs=256, max_num_batched_tokens=1024, max_waiting_requests=256
    )
    requests = fill(driver, 116)
    driver.scheduler._control.max_num_seqs = 50  # as the governor does
    critical = driver.add(make_request("critical", [39, 38, 37], max_tokens=2, priority=CRITICAL))
    driver.schedule()
    assert critical.state is RUNNING
    assert sum(request.num_preemptions for request in requests) <= 1
    driver.apply()


@pytest.mark.parametrize("number", [1, 2])
def test_criticals_under_a_lowered_limit_cost_at_most_a_row_each(number: int) -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    requests = fill(driver, 8)
    control = driver.scheduler._control
    control.max_num_seqs = 3
    criticals = [driver.add(make_request(f"c{n}", [39, n], max_tokens=2, priority=CRITICAL)) for n in range(number)]
    driver.schedule()
    assert all(critical.state is RUNNING for critical in criticals)
    assert sum(request.num_preemptions for request in requests) <= number
    driver.apply()
    driver.run()


def steps_until_critical_starts(*, is_cached: bool, num_held: int, max_inflight_steps: int) -> int:
    """Twelve blocks for a CRITICAL in a pool of sixteen, of which LOW requests hold some; eight may be cached."""
    driver = SchedulerDriver(
        num_blocks=16, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_inflight_steps=max_inflight_steps
    )
    prompt = list(range(40)) + [5] * 8
    driver.add(make_request("first", prompt[:33], max_tokens=1))
    driver.run()
    fill(driver, num_held, max_tokens=40)
    if not is_cached:
        prompt = [39, *prompt[1:]]
    critical = driver.add(make_request("critical", prompt, max_tokens=1, priority=CRITICAL))
    for number in range(60):
        driver.step()
        if critical.first_scheduled_time is not None:
            driver.run()
            return number
    raise AssertionError("a CRITICAL did not start within 60 steps")


@pytest.mark.parametrize("num_held", [2, 5, 6])
@pytest.mark.parametrize("max_inflight_steps", [1, 2])
def test_a_critical_whose_prefix_is_cached_enters_no_later_than_a_cold_one(
    num_held: int, max_inflight_steps: int
) -> None:
    cold, cached = (
        steps_until_critical_starts(is_cached=is_cached, num_held=num_held, max_inflight_steps=max_inflight_steps)
        for is_cached in (False, True)
    )
    assert cached <= cold <= 2


def test_nobody_is_preempted_for_blocks_that_others_keep() -> None:
    """Eight LOW rows name 48 blocks and free eight, because a CRITICAL shares the other five with them."""
    driver = SchedulerDriver(num_blocks=20, block_size=4, max_num_seqs=16, max_num_batched_tokens=64)
    driver.add(make_request("holder", [*range(20), 29], max_tokens=3, priority=CRITICAL))
    driver.step()
    for n in range(8):
        driver.add(make_request(f"low{n}", [*range(20), 30 + n], max_tokens=3, priority=LOW, arrival_time=1.0 + n))
    driver.schedule()
    assert driver.scheduler.num_running == 9
    critical = driver.add(make_request("critical", [39] * 60, max_tokens=1, priority=CRITICAL, arrival_time=20.0))
    driver.apply()
    held = held_by(driver, 16)
    driver.schedule()
    assert check_victims(driver, held, critical, 15) == []
    driver.apply()
    driver.run()


def test_rows_that_share_their_blocks_leave_together_where_each_is_needed() -> None:
    """Eight LOW rows hold thirteen blocks, five of them in common; a CRITICAL needs twelve."""
    driver = SchedulerDriver(num_blocks=13, block_size=4, max_num_seqs=16, max_num_batched_tokens=64)
    driver.add(make_request("low0", [*range(20), 30], max_tokens=3, priority=LOW))
    driver.step()
    for n in range(1, 8):
        driver.add(make_request(f"low{n}", [*range(20), 30 + n], max_tokens=3, priority=LOW, arrival_time=float(n)))
    driver.schedule()
    assert driver.scheduler.num_running == 8 and driver.kv.num_free_blocks == 0
    critical = driver.add(make_request("critical", [39] * 48, max_tokens=1, priority=CRITICAL, arrival_time=20.0))
    driver.apply()
    held = held_by(driver, 16)
    driver.schedule()
    assert len(check_victims(driver, held, critical, 12)) == 8
    driver.apply()
    driver.run()


def test_nobody_is_preempted_for_a_critical_whose_tenant_is_over_its_quota() -> None:
    driver = SchedulerDriver(
        num_blocks=64, max_num_seqs=8, max_num_batched_tokens=24, tenants={"quota": TenantLimits(max_blocks=8)}
    )
    requests = fill(driver, 7)
    first = driver.add(make_request("first", [20] * 17, max_tokens=8, priority=CRITICAL, tenant="quota"))
    second = driver.add(make_request("second", [21] * 17, max_tokens=8, priority=CRITICAL, tenant="quota"))
    while not first.is_finished:
        driver.step()
        assert sum(request.num_preemptions for request in requests) == 0
        assert first.is_finished or second.state is WAITING
    driver.run()


def test_with_one_row_a_low_request_gives_way_in_the_next_step() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    low = fill(driver, 1)[0]
    critical = driver.add(make_request("critical", [39, 38], max_tokens=2, priority=CRITICAL, arrival_time=9.0))
    driver.schedule()
    assert (low.state, critical.state) == (PREEMPTED, RUNNING)
    driver.apply()
    driver.run()
    assert low.num_preemptions == 1 and low.output_token_ids == naive_output(low)[0]


def last_of_two_in_flight(driver: SchedulerDriver, critical: Request) -> int:
    """Adds the CRITICAL while two steps are in flight, and lets the next one choose victims; their number."""
    while len(driver.in_flight) < 2:
        driver.schedule()
    driver.add(critical)
    driver.apply()
    driver.schedule()
    return driver.scheduler.stats().num_preemptions


def check_enters_now(driver: SchedulerDriver, critical: Request, num_preemptions: int) -> None:
    """The blocks of the victims are free in the next step, and no others are taken."""
    while driver.in_flight:
        driver.apply()
    driver.schedule()
    assert critical.state is RUNNING, "its victims have left and the CRITICAL still waits"
    assert driver.scheduler.stats().num_preemptions == num_preemptions
    driver.apply()
    driver.run()


@pytest.mark.parametrize("prompt_tokens", [20, 25, 30, 34])
def test_with_two_steps_in_flight_a_critical_enters_after_one_round_of_victims(prompt_tokens: int) -> None:
    driver = SchedulerDriver(
        num_blocks=16, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_inflight_steps=2
    )
    for n in range(8):
        driver.add(make_request(f"low{n}", [n] * 5, max_tokens=40, priority=LOW, arrival_time=float(n)))
    critical = make_request("critical", [39] * prompt_tokens, max_tokens=2, priority=CRITICAL, arrival_time=20.0)
    num_preemptions = last_of_two_in_flight(driver, critical)
    assert num_preemptions == math.ceil(math.ceil(prompt_tokens / 4) / 2), "each of the rows has two blocks"
    check_enters_now(driver, critical, num_preemptions)


def test_with_two_steps_in_flight_rows_that_share_blocks_leave_in_one_round() -> None:
    """Eight LOW rows hold thirteen blocks, five of them in common; a CRITICAL needs twelve."""
    driver = SchedulerDriver(
        num_blocks=13, block_size=8, max_num_seqs=16, max_num_batched_tokens=128, max_inflight_steps=2
    )
    for n in range(8):
        driver.add(make_request(f"low{n}", [*range(40), 30 + n], max_tokens=7, priority=LOW, arrival_time=float(n)))
        if not n:
            driver.schedule()
            driver.apply()
    critical = make_request("critical", [39] * 96, max_tokens=1, priority=CRITICAL, arrival_time=20.0)
    num_preemptions = last_of_two_in_flight(driver, critical)
    assert num_preemptions == 8
    check_enters_now(driver, critical, num_preemptions)


# --- groups -------------------------------------------------------------------------------------------------------


def group(number: int, name: str = "g", **fields: object) -> list[Request]:
    fields = {"prompt": 12, "max_tokens": 3, **fields}
    leader = make_request(f"{name}0", **fields)
    return [leader, *(make_request(f"{name}{index}", leader=leader, **fields) for index in range(1, number))]


def gets_right_tokens(requests: Iterable[Request]) -> bool:
    return all((r.output_token_ids, r.finish_reason) == naive_output(r) for r in requests)


def evicted_by(driver: SchedulerDriver, newcomer: Request) -> list[str]:
    """Ids of the requests that end for the newcomer; none if it is refused."""
    try:
        return [request.request_id for request in driver.add_group([newcomer])]
    except Busy:
        return []


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_a_group_that_has_begun_is_not_evicted(policy: str) -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_batched_tokens=4, max_waiting_requests=3, policy=policy)
    requests = group(3, prompt=16)
    driver.add_group(requests)
    driver.step()
    assert [request.state for request in requests] == [RUNNING, WAITING, WAITING]
    for number in range(4):
        newcomer = make_request(f"high{number}", [30, number], priority=HIGH, arrival_time=5.0, tenant=f"t{number}")
        assert not {request.request_id for request in requests} & set(evicted_by(driver, newcomer))
    driver.run()
    assert gets_right_tokens(requests)


def test_a_group_whose_leader_waits_for_its_return_is_not_evicted() -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_seqs=1, max_num_batched_tokens=4, max_waiting_requests=3)
    requests = group(3, prompt=16, priority=LOW)
    driver.add_group(requests)
    driver.step()
    driver.scheduler._state.preempt(requests[0].row, driver.now)
    for number in range(4):
        newcomer = make_request(f"high{number}", [30, number], priority=HIGH, arrival_time=5.0)
        assert not {request.request_id for request in requests} & set(evicted_by(driver, newcomer))
    driver.run()
    assert gets_right_tokens(requests)


def test_a_waiting_group_counts_as_many_as_it_has_sequences() -> None:
    driver = SchedulerDriver(num_blocks=64, max_waiting_requests=4, max_waiting_tokens=40)
    driver.add_group(group(3, prompt=12))
    room = driver.scheduler.admission.waiting_room(driver.now)
    assert (room.num_requests, room.num_tokens) == (3, 36)
    driver.add(make_request("last", 2))
    with pytest.raises(Busy, match="4 of 4 requests"):
        driver.add(make_request("beyond", 1))
    driver.run()


@pytest.mark.parametrize("max_waiting", [{"max_waiting_requests": 4}, {"max_waiting_tokens": 40}])
def test_a_group_is_admitted_whole_or_not_at_all(max_waiting: dict[str, int]) -> None:
    driver = SchedulerDriver(num_blocks=64, **max_waiting)
    driver.add_group(group(2, prompt=12))
    before = driver.scheduler.stats()
    with pytest.raises(Busy, match="waiting set is full"):
        driver.add_group(group(3, "late", prompt=12))
    assert replace(driver.scheduler.stats(), tenants=before.tenants) == before
    driver.run()


@pytest.mark.parametrize("mishap", ["cancelled", "failed", "preempted"])
@pytest.mark.parametrize("max_inflight_steps", [1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_siblings_run_whatever_happens_to_their_leader_before_the_fork(
    mishap: str, max_inflight_steps: int, enable_prefix_caching: bool
) -> None:
    driver = SchedulerDriver(
        num_blocks=64,
        max_num_batched_tokens=4,
        max_inflight_steps=max_inflight_steps,
        enable_prefix_caching=enable_prefix_caching,
    )
    requests = group(4, prompt=15, max_tokens=5)
    driver.add_group(requests)
    driver.step()
    driver.step()
    match mishap:
        case "cancelled":
            driver.cancel("g0")
        case "failed":
            driver.runner.not_finite.add("g0")
        case "preempted":
            driver.scheduler._state.preempt(requests[0].row, driver.now)
    driver.run()
    assert gets_right_tokens(requests[0 if mishap == "preempted" else 1 :])


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_a_waiting_group_is_evicted_whole(policy: str) -> None:
    """The driver checks that each of its sequences has one end."""
    driver = SchedulerDriver(num_blocks=64, max_waiting_requests=3, policy=policy)
    driver.add_group(group(3))
    newcomer = make_request("high", [30], priority=HIGH, tenant="other", arrival_time=1.0)
    assert sorted(evicted_by(driver, newcomer)) == ["g0", "g1", "g2"]
    assert all(isinstance(driver.requests[f"g{n}"].error, Busy) for n in range(3))
    assert sum(driver.scheduler.stats().evicted_by_class) == 3
    driver.run()
    assert gets_right_tokens([newcomer])


def test_a_cancelled_sequence_of_a_waiting_group_leaves_the_others_in_their_place() -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_seqs=4)
    requests = group(4)
    driver.add_group(requests)
    driver.add(make_request("behind", [30], arrival_time=1.0, max_tokens=9))
    for name in ("g0", "g2"):
        driver.cancel(name)
        check_invariants(driver.scheduler)
    driver.run()
    assert gets_right_tokens([requests[1], requests[3]])


# --- the return of preempted requests -----------------------------------------------------------------------------


def steps_away(*, newcomers: int) -> int:
    """Steps that a preempted request of a static batch stays out; newer ones of a better class may wait before it."""
    driver = SchedulerDriver(
        num_blocks=12,
        block_size=4,
        max_num_batched_tokens=64,
        ageing_s=1000.0,
        scheduling_strategy="static",
        batch_size=3,
        batch_timeout_ms=0.0,
    )
    driver.add(make_request("long", [1] * 4, max_tokens=40))
    driver.add(make_request("short", [2] * 16, max_tokens=10, arrival_time=1.0))
    driver.add(make_request("victim", [3] * 8, max_tokens=12, arrival_time=2.0))
    driver.step()
    for number in range(newcomers):
        driver.add(make_request(f"new{number}", [30, number], priority=HIGH, arrival_time=3.0 + number))
    victim = driver.requests["victim"]
    num_away = 0
    while not victim.is_finished:
        driver.step()
        num_away += victim.state is PREEMPTED
    assert victim.num_preemptions == 1
    driver.run()
    return num_away


@pytest.mark.parametrize("newcomers", [1, 5])
def test_a_preempted_request_returns_to_its_static_batch_without_asking(newcomers: int) -> None:
    assert steps_away(newcomers=newcomers) == steps_away(newcomers=0)
