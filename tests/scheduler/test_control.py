"""Fair turns, strategies, controllers and predictions, as the scheduler uses them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from support.scheduler.scheduling import SchedulerDriver, make_config, make_request
from tidewheel.batch import ScheduledBatch
from tidewheel.request import Priority
from tidewheel.scheduler.controllers import MIN_TOKEN_BUDGET
from tidewheel.scheduler.policy import POLICIES
from tidewheel.tenants import TenantLimits, limits_of


def tokens_of(driver: SchedulerDriver, tenant: str) -> int:
    return sum(r.num_output_tokens for r in driver.requests.values() if r.tenant == tenant)


def share_of_one(weights: dict[str, TenantLimits], policy: str) -> float:
    """Part of the output that tenant `one` gets while `ten` has sent ten times as many requests before it."""
    driver = SchedulerDriver(
        policy=policy, max_num_seqs=4, num_blocks=256, tenants=weights, max_waiting_requests=1000
    )
    for number in range(200):
        driver.add(make_request(f"t{number}", prompt=[number % 9] * 4, max_tokens=8, tenant="ten"))
    for number in range(20):
        driver.add(make_request(f"o{number}", prompt=[number % 9] * 4, max_tokens=8, tenant="one"))
    while any(request.request_id.startswith("o") for request in driver.scheduler._state.waiting):
        driver.step()
    return tokens_of(driver, "one") / (tokens_of(driver, "one") + tokens_of(driver, "ten"))


def test_fair_gives_two_tenants_the_same_whatever_they_send() -> None:
    assert share_of_one({}, "fair") == pytest.approx(0.5, abs=0.06)
    assert share_of_one({}, "priority") < 0.15


def test_fair_follows_the_weights() -> None:
    assert share_of_one({"one": TenantLimits(weight=3.0)}, "fair") == pytest.approx(0.75, abs=0.06)


def test_fair_serves_a_tenant_by_class() -> None:
    driver = SchedulerDriver(policy="fair", max_num_seqs=1)
    for number, level in enumerate([Priority.LOW, Priority.CRITICAL, Priority.NORMAL]):
        driver.add(make_request(f"r{number}", prompt=1, max_tokens=1, priority=level, tenant="t"))
    started = []
    while (batch := driver.schedule()) is not None:
        started += [new.request.request_id for new in batch.new_rows]
        driver.apply()
    assert started == ["r1", "r2", "r0"]


def test_a_static_batch_runs_to_its_end_before_the_next() -> None:
    driver = SchedulerDriver(num_blocks=64, scheduling_strategy="static", batch_size=2)
    for number, max_tokens in enumerate([2, 6, 3, 3, 2]):
        driver.add(make_request(f"r{number}", prompt=[number] * 2, max_tokens=max_tokens, arrival_time=driver.now))
    joined = []
    while driver.scheduler.has_unfinished:
        num_running = driver.scheduler.num_running
        batch = driver.schedule()
        assert batch is not None
        if batch.new_rows:
            assert num_running == 0
            joined.append([new.request.request_id for new in batch.new_rows])
        driver.apply()
    assert joined == [["r0", "r1"], ["r2", "r3"], ["r4"]]


def test_a_dynamic_batch_waits_for_its_window() -> None:
    driver = SchedulerDriver(num_blocks=64, scheduling_strategy="dynamic")
    driver.add(make_request("a", arrival_time=0.0))
    assert driver.scheduler.schedule(0.049) is None
    driver.now = 0.050 - 1.0
    assert driver.schedule() is not None
    driver.apply()
    driver.run()


def test_a_long_prompt_takes_no_more_than_its_chunk_and_leaves_the_rest_to_others() -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_batched_tokens=16, long_prefill_token_threshold=4)
    driver.add(make_request("long", prompt=[1] * 40))
    driver.add(make_request("short", prompt=[2] * 6, arrival_time=1.0))
    batch = driver.schedule()
    assert batch is not None and batch.num_scheduled_tokens.tolist() == [4, 4]
    driver.apply()
    driver.run()


def test_prompts_are_cut_to_a_slice_and_decodes_are_not() -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_batched_tokens=64, least_cut_tokens=2)
    for number in range(3):
        driver.add(make_request(f"decode{number}", prompt=[number], max_tokens=20))
    driver.step()
    driver.add(make_request("long", prompt=[7] * 40))
    batch = driver.scheduler.schedule(driver.now, 0.001)
    assert batch is not None and batch.num_decodes == 3 and batch.num_tokens == 5
    driver.scheduler.cancel("long")


@pytest.mark.parametrize("policy", ["priority", "fifo"])
def test_the_best_class_is_of_all_requests(policy: str) -> None:
    driver = SchedulerDriver(policy=policy, max_num_seqs=1)
    classes = [driver.scheduler.best_class()]
    for name, priority in (("low", Priority.LOW), ("high", Priority.HIGH)):
        driver.add(make_request(name, priority=priority, max_tokens=2))
        classes.append(driver.scheduler.best_class())
    driver.step()
    classes.append(driver.scheduler.best_class())
    assert classes == ([0, 4, 2, 2] if policy == "priority" else [0, 3, 3, 3])
    driver.run()


def test_the_token_budget_follows_the_target() -> None:
    driver = SchedulerDriver(
        num_blocks=512, max_num_batched_tokens=64, max_num_seqs=8, target_tpot_ms=100.0, max_model_len=600
    )
    driver.add(make_request("decode", prompt=1, max_tokens=60))
    driver.add(make_request("prompt", prompt=[3] * 500, max_tokens=1))
    batches = []
    while not driver.requests["prompt"].is_finished:
        batch = driver.schedule()
        assert batch is not None
        batches.append(batch.num_tokens)
        driver.apply()  # a second later: ten times the target
    assert driver.scheduler.stats().token_budget == MIN_TOKEN_BUDGET
    assert batches[0] == 64 and MIN_TOKEN_BUDGET in batches
    driver.run()


def test_the_governor_limits_joins_and_preempts_nobody() -> None:
    driver = SchedulerDriver(
        num_blocks=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_seqs_governor=True,
        governor_target_latency_ms=100.0,
        ageing_s=1000.0,
    )
    for number in range(16):
        driver.add(make_request(f"r{number}", prompt=[number] * 2, max_tokens=12))
    for _ in range(8):
        driver.step()
    stats = driver.scheduler.stats()
    assert stats.max_num_seqs < 8 and stats.num_preemptions == 0
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0


def test_lengths_are_learned_from_what_ends_by_itself() -> None:
    driver = SchedulerDriver(num_blocks=256, predictor_prior_tokens=100)
    first = driver.add(make_request("first", max_tokens=3))
    assert first.predicted_output_tokens == 3.0  # the prior, within what was asked for
    driver.run()
    for number in range(10):
        driver.add(make_request(f"r{number}", max_tokens=3))
        driver.run()
        cancelled = driver.add(make_request(f"c{number}", max_tokens=30))
        driver.step()
        driver.cancel(cancelled.request_id)
    later = driver.add(make_request("later", max_tokens=200))
    assert later.predicted_output_tokens < 8.0
    stats = driver.scheduler.stats()
    assert stats.num_predictions == 11 and stats.prediction_error < 1.0
    driver.run()


def play(seed: int, policy: str) -> list[ScheduledBatch]:
    """A random run, from nothing but the seed."""
    draw = random.Random(seed)
    driver = SchedulerDriver(num_blocks=24, block_size=2, policy=policy, max_num_seqs=4, max_waiting_requests=64)
    batches = []
    for number in range(60):
        if draw.random() < 0.4:
            request = make_request(
                f"r{number}",
                draw.choices(range(9), k=draw.randint(1, 12)),
                max_tokens=draw.randint(1, 12),
                priority=draw.choice(list(Priority)),
                tenant=draw.choice("abc"),
                arrival_time=driver.now,
                deadline=driver.now + draw.choice([200.0, 500.0]),
            )
            driver.add(request)
        if draw.random() < 0.1:
            driver.cancel(f"r{draw.randint(0, number)}")
        batch = driver.schedule()
        if batch is not None:
            batches.append(batch)
            driver.apply()
    driver.run()
    return batches


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_events_give_the_same_schedule(policy: str) -> None:
    first, second = play(7, policy), play(7, policy)
    assert len(first) == len(second) > 30
    for a, b in zip(first, second, strict=True):
        for name in ("rows", "start_positions", "num_scheduled_tokens", "samples", "block_ids", "freed_rows"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
        assert [new.request.request_id for new in a.new_rows] == [new.request.request_id for new in b.new_rows]


def test_limits_of_a_tenant_are_its_own_or_those_of_everybody() -> None:
    own, everybody = TenantLimits(weight=2.0), TenantLimits(weight=3.0)
    config = make_config(tenants={"a": own, "*": everybody})
    assert (limits_of(config.tenants, "a"), limits_of(config.tenants, "b")) == (own, everybody)
    assert limits_of(make_config().tenants, "a") == TenantLimits()
