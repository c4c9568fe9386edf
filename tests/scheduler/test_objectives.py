"""Objectives of requests: order, chunks, misses that are predicted, and counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.errors import DeadlineExceeded
from tidewheel.request import FinishReason, Priority, Request, RequestObjective
from tidewheel.scheduler.policy import POLICIES, rank_of

NORMAL, LOW = Priority.NORMAL, Priority.LOW


def learned_driver(policy: str = "deadline", **changes: object) -> SchedulerDriver:
    """Return a driver after steps of 50 ms, whose scheduler knows their time."""
    driver = SchedulerDriver(policy=policy, num_blocks=512, max_num_batched_tokens=64, **changes)
    driver.tick = 0.05
    for number in range(16):
        driver.add(make_request(f"learn{number}", prompt=[100 + number] * 20, max_tokens=1, arrival_time=driver.now))
        driver.run()
    return driver


def objective(ttft_s: float = math.inf, tpot_s: float = math.inf, *, refuses: bool = False) -> RequestObjective:
    return RequestObjective(ttft_s, tpot_s, refuses)


def arrive(driver: SchedulerDriver, name: str, prompt: int = 4, **fields: object) -> Request:
    return driver.add(make_request(name, prompt=[hash(name) % 97] * prompt, arrival_time=driver.now, **fields))


def test_the_least_slack_goes_first() -> None:
    driver = learned_driver(max_num_seqs=1)
    arrive(driver, "running", max_tokens=8)
    driver.step()
    late = arrive(driver, "late", objective=objective(6.0))
    long = arrive(driver, "long", prompt=200, max_tokens=1, objective=objective(5.0))
    short = arrive(driver, "short", objective=objective(4.9))
    none = arrive(driver, "none")
    due = arrive(driver, "due", deadline=driver.now + 4.55)
    assert long.latest_start < driver.now + 4.9
    driver.run()
    order = sorted((late, long, short, none, due), key=lambda one: one.first_scheduled_time or 0.0)
    assert [one.request_id for one in order] == ["due", "long", "short", "late", "none"]


def test_a_miss_predicted_on_arrival_is_refused_with_prediction_and_limit() -> None:
    driver = learned_driver()
    with pytest.raises(DeadlineExceeded, match=r"first token is expected \d+ ms after the arrival, and ttft_ms is 5"):
        arrive(driver, "first", objective=objective(0.005, refuses=True))
    with pytest.raises(DeadlineExceeded, match=r"a token is expected to take \d+\.\d ms, and tpot_ms is 1"):
        arrive(driver, "later", objective=objective(tpot_s=0.001, refuses=True))
    stats = driver.scheduler.stats()
    assert (stats.num_hopeless, stats.objectives_by_class, stats.objectives_met_by_class) == (
        2, [0, 0, 2, 0], [0, 0, 0, 0]
    )  # fmt: skip
    assert (stats.tenants["other"].num_objectives, stats.tenants["other"].num_objectives_met) == (2, 0)


def test_a_miss_predicted_on_arrival_lowers_the_class() -> None:
    driver = learned_driver()
    request = arrive(driver, "first", objective=objective(0.005))
    lowest = arrive(driver, "lowest", priority=LOW, objective=objective(tpot_s=0.001))
    assert (request.service_class, request.latest_start, lowest.service_class) == (LOW, math.inf, LOW)
    assert driver.scheduler.stats().num_downgraded_objective == 1
    driver.run()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_waiting_request_that_can_no_longer_meet_its_objective(refuses: bool) -> None:
    driver = learned_driver(max_num_seqs=1, ageing_s=1000.0)
    arrive(driver, "running", max_tokens=20)
    driver.step()
    request = arrive(driver, "waits", objective=objective(1.2, refuses=refuses))
    begun = driver.now
    while driver.now < begun + 1.4:
        driver.step()
    if refuses:
        assert isinstance(request.error, DeadlineExceeded) and "ttft_ms is 1200" in str(request.error)
    else:
        assert (request.service_class, driver.scheduler.stats().num_downgraded_objective) == (LOW, 1)
    driver.run()
    assert sum(driver.scheduler.stats().objectives_met_by_class) == 0


def test_chunks_shrink_while_a_request_with_a_time_per_token_decodes() -> None:
    driver = learned_driver()
    request = arrive(driver, "decodes", max_tokens=30, objective=objective(tpot_s=0.12))
    driver.step()
    driver.step()
    prompt = arrive(driver, "prompt", prompt=200, max_tokens=1)
    batch = driver.schedule()
    assert batch is not None and batch.num_tokens < 64
    driver.apply()
    driver.cancel(request.request_id)
    batch = driver.schedule()
    assert batch is not None and batch.num_tokens == 64
    driver.apply()
    driver.run()
    assert prompt.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("token_s", [0.0, 1e-5])
def test_all_rows_decode_where_no_step_is_as_short_as_a_time_per_token(token_s: float) -> None:
    driver = learned_driver(max_num_seqs=40)
    others = [arrive(driver, f"other{number}", max_tokens=200) for number in range(24)]
    paced = arrive(driver, "paced", max_tokens=200, objective=objective(tpot_s=0.06))
    for _ in range(8):
        driver.step()
    for _ in range(60):  # steps that take longer than before
        batch = driver.schedule()
        assert batch is not None
        driver.tick = 0.1 + token_s * batch.num_tokens
        driver.apply()
    assert not paced.is_demoted and batch.num_decodes == 1 + len(others)


def test_without_an_objective_the_rank_is_that_of_the_deadline() -> None:
    for name, policy in POLICIES.items():
        plain, asking = make_request(), make_request(objective=objective(1.0))
        asking.latest_start = 0.5
        is_changed = rank_of(policy, plain) != rank_of(policy, asking)
        assert is_changed == (name == "deadline")


OBJECTIVES = st.none() | st.builds(
    RequestObjective,
    st.sampled_from([0.5, 3.0, 20.0, math.inf]),
    st.sampled_from([0.5, 2.0, 5.0, math.inf]),
    st.booleans(),
)
REQUESTS = st.tuples(
    OBJECTIVES, st.integers(1, 40), st.integers(1, 8), st.sampled_from(Priority), st.sampled_from([None, 9.0]),
    st.integers(0, 3), st.integers(1, 2), st.booleans(),
)  # fmt: skip


@given(
    st.lists(REQUESTS, min_size=1, max_size=25),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([1, 2]),
    st.sampled_from([12, 64]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_request_ends_once_and_is_counted_once(
    arrivals: list[tuple[RequestObjective | None, int, int, Priority, float | None, int, int, bool]],
    policy: str,
    max_inflight_steps: int,
    num_blocks: int,
) -> None:
    driver = SchedulerDriver(
        policy=policy, num_blocks=num_blocks, max_inflight_steps=max_inflight_steps, ageing_s=10.0
    )
    requests: list[Request] = []
    for number, (wanted, prompt, output, priority, left_s, steps, count, is_cancelled) in enumerate(arrivals):
        group: list[Request] = []
        for index in range(count):
            group.append(
                make_request(
                    f"{number}-{index}", prompt=[number % 7] * prompt, max_tokens=output, priority=priority,
                    arrival_time=driver.now, deadline=None if left_s is None else driver.now + left_s,
                    objective=wanted, leader=group[0] if group else None,
                )
            )  # fmt: skip
        requests += group
        try:
            driver.add_group(group)
        except DeadlineExceeded:
            assert left_s is not None or (wanted is not None and wanted.refuses)
        for _ in range(steps):
            driver.step()
            check_invariants(driver.scheduler)
        if is_cancelled:
            driver.cancel(group[0].request_id)
    driver.run()
    stats = driver.scheduler.stats()
    counted = [
        one for one in requests if one.objective is not None and one.finish_reason is not FinishReason.CANCELLED
    ]
    assert sum(stats.objectives_by_class) == stats.tenants["other"].num_objectives == len(counted)
    met = [one for one in counted if one.meets_objective]
    assert sum(stats.objectives_met_by_class) == stats.tenants["other"].num_objectives_met == len(met)
    for request in met:
        assert request.objective is not None
        assert request.first_token_time is not None and request.last_token_time is not None
        assert request.first_token_time - request.arrival_time <= request.objective.ttft_s
        assert request.last_token_time - request.first_token_time <= request.objective.tpot_s * max(
            request.num_output_tokens - 1, 1
        )


def test_a_prompt_on_an_idle_engine_is_not_judged_by_the_steps_of_an_ended_paced_request() -> None:
    driver = learned_driver()
    for number in range(9):  # steps of several lengths, whose time grows with their tokens
        arrive(driver, f"other{number}", max_tokens=20)
    arrive(driver, "paced", max_tokens=30, objective=objective(tpot_s=0.12))
    driver.run()
    request = arrive(driver, "next", prompt=60, objective=objective(0.5, refuses=True))
    driver.run()
    assert request.finish_reason is FinishReason.LENGTH


def test_a_sequence_whose_leader_computes_their_prompt_is_not_late() -> None:
    driver = learned_driver(max_model_len=1024)
    first = make_request("first", prompt=[7] * 400, arrival_time=driver.now, objective=objective(0.9, refuses=True))
    second = make_request(
        "second", prompt=[7] * 400, arrival_time=driver.now, objective=first.objective, leader=first
    )
    driver.add_group([first, second])
    driver.run()
    assert first.error is second.error is None


def test_a_cached_prompt_is_not_late_before_its_own_time() -> None:
    driver = learned_driver(max_num_seqs=1)
    prompt = [7] * 200
    driver.add(make_request("computes", prompt=prompt, max_tokens=12, arrival_time=driver.now))
    driver.step()
    request = make_request(
        "shares", prompt=prompt, max_tokens=1, arrival_time=driver.now, objective=objective(1.525, refuses=True)
    )
    driver.add(request)
    driver.run()
    assert request.error is None and request.meets_objective


@pytest.mark.parametrize("num_paced", [2, 8])
def test_late_paced_rows_do_not_stop_other_rows(num_paced: int) -> None:
    driver = learned_driver(max_num_seqs=40)
    others = [arrive(driver, f"other{number}", max_tokens=150) for number in range(8)]
    paced = [
        arrive(driver, f"paced{number}", max_tokens=150, objective=objective(tpot_s=0.11))
        for number in range(num_paced)
    ]
    longest = 0.0
    while any(not one.is_finished for one in (*others, *paced)):
        batch = driver.schedule()
        assert batch is not None
        driver.tick = 0.04 + 0.005 * batch.num_tokens
        driver.apply()
        for one in others:
            if not one.is_finished and one.first_token_time is not None:
                longest = max(longest, driver.now - driver.scheduler._state.columns.last_token_times[one.row])
    assert longest < 5.0


def test_a_prompt_of_a_better_class_is_not_cut_for_a_time_per_token() -> None:
    driver = learned_driver()
    arrive(driver, "decodes", max_tokens=30, priority=LOW, objective=objective(tpot_s=0.12))
    driver.step()
    driver.step()
    arrive(driver, "prompt", prompt=200, max_tokens=1, priority=Priority.CRITICAL)
    batch = driver.schedule()
    assert batch is not None and batch.num_tokens == 64
    driver.apply()
    driver.run()
