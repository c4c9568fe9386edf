"""Short requests that come while a long prompt is computed in chunks do not wait for all of it."""

from __future__ import annotations

from typing import Any

import pytest

from support.scheduler.scheduling import SchedulerDriver, make_request
from tidewheel.batch import ScheduledBatch
from tidewheel.request import Priority, Request, RequestState
from tidewheel.scheduler.policy import POLICIES
from tidewheel.scheduler.step_plan import StepLimits, StepPlan

CRITICAL, HIGH, NORMAL, LOW = Priority
BUDGET = 32
LONG = 200


def make_driver(**changes: Any) -> SchedulerDriver:
    settings = {"num_blocks": 256, "max_num_batched_tokens": BUDGET, "max_num_seqs": 16, "max_model_len": 512}
    return SchedulerDriver(**(settings | changes))


def long_prompt(driver: SchedulerDriver, **fields: Any) -> Request:
    """After its first step."""
    request = driver.add(make_request("long", prompt=[1] * LONG, max_tokens=4, **fields))
    driver.step()
    return request


def newcomer(driver: SchedulerDriver, name: str = "short", prompt: int = 4, **fields: Any) -> Request:
    fields = {"max_tokens": 4, "arrival_time": driver.now} | fields
    return driver.add(make_request(name, prompt=[2 + sum(map(ord, name)) % 30] * prompt, **fields))


def schedule(driver: SchedulerDriver) -> dict[str, int]:
    """Tokens of the next step, by request; it is applied too."""
    batch = driver.schedule()
    assert batch is not None
    counts = tokens_of(driver, batch)
    driver.apply()
    return counts


def tokens_of(driver: SchedulerDriver, batch: ScheduledBatch) -> dict[str, int]:
    requests = [driver.scheduler._state.columns.request(row) for row in batch.rows.tolist()]
    return {r.request_id: n for r, n in zip(requests, batch.num_scheduled_tokens.tolist(), strict=True)}


@pytest.mark.parametrize("policy", POLICIES)
def test_newcomers_share_the_next_step(policy: str) -> None:
    driver = make_driver(policy=policy)
    long_prompt(driver)
    shorts = [newcomer(driver, f"s{number}") for number in range(4)]
    assert schedule(driver) == {"long": 16, "s0": 4, "s1": 4, "s2": 4, "s3": 4}
    assert all(len(driver.delivered[request.request_id]) == 1 for request in shorts)
    assert schedule(driver) == {"long": 28, "s0": 1, "s1": 1, "s2": 1, "s3": 1}
    driver.run()


def test_newcomers_share_the_next_step_that_is_scheduled_of_two_in_flight() -> None:
    driver = make_driver(max_inflight_steps=2)
    long_prompt(driver)
    short = newcomer(driver)
    driver.step()
    driver.step()
    assert len(driver.delivered[short.request_id]) == 1
    driver.run()


def test_what_newcomers_do_not_take_goes_back() -> None:
    driver = make_driver()
    long = long_prompt(driver)
    newcomer(driver, prompt=3)
    assert schedule(driver) == {"long": 29, "short": 3}
    while len(driver.delivered[long.request_id]) == 0:
        assert sum(schedule(driver).values()) == BUDGET or len(driver.delivered[long.request_id]) == 1
    driver.run()


def test_a_stream_of_newcomers_leaves_the_long_prompt_half_of_every_step() -> None:
    driver = make_driver(max_num_seqs=32, enable_prefix_caching=False)
    long = long_prompt(driver)
    shares: list[int] = []
    while len(driver.delivered[long.request_id]) == 0:
        for number in range(4):
            newcomer(driver, f"s{len(shares)}.{number}", max_tokens=1)
        shares.append(schedule(driver)["long"])
    assert shares == [BUDGET // 2] * 9 + [24]  # that fit
    driver.run()


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "fifo"])
def test_lower_classes_wait_for_all_of_it(policy: str) -> None:
    driver = make_driver(policy=policy)
    long_prompt(driver, priority=HIGH)
    lower = [newcomer(driver, f"s{level}", priority=level) for level in (NORMAL, LOW)]
    assert schedule(driver) == {"long": BUDGET}
    newcomer(driver, "equal", priority=HIGH)
    assert schedule(driver) == {"long": BUDGET - 4, "equal": 4}
    assert {request.state for request in lower} == {RequestState.WAITING}
    driver.run()


def test_where_classes_do_not_count_they_share_alike() -> None:
    driver = make_driver(policy="fifo")
    long_prompt(driver, priority=HIGH)
    newcomer(driver, priority=LOW)
    assert schedule(driver) == {"long": BUDGET - 4, "short": 4}
    driver.run()


def test_tenants_share_whoever_was_served_least() -> None:
    driver = make_driver(policy="fair")
    driver.add(make_request("busy", prompt=[9] * 30, max_tokens=1, tenant="busy"))
    driver.run()
    driver.add(make_request("long", prompt=[1] * LONG, tenant="long"))
    newcomer(driver, tenant="busy")
    assert schedule(driver) == {"long": BUDGET - 4, "short": 4}
    driver.run()


def test_a_prompt_that_is_due_earlier_waits_for_nobody_who_is_due_later() -> None:
    driver = make_driver(policy="deadline")
    long_prompt(driver, deadline=900.0)
    newcomer(driver, "later", deadline=901.0)
    newcomer(driver, "whenever")
    assert schedule(driver) == {"long": BUDGET}
    newcomer(driver, "soon", deadline=800.0)
    newcomer(driver, "as soon", deadline=900.0)
    assert schedule(driver) == {"long": BUDGET - 8, "soon": 4, "as soon": 4}
    driver.run()


@pytest.mark.parametrize(("length", "share"), [(83, 16), (84, 0)])
def test_only_those_share_who_have_less_than_half_as_much_to_compute(length: int, share: int) -> None:
    """Others would be done no earlier than behind it, or by less than it would be later."""
    driver = make_driver()
    long_prompt(driver)  # 168 tokens are left
    other = newcomer(driver, prompt=length)
    assert schedule(driver).get(other.request_id, 0) == share
    driver.run()


def test_nobody_overtakes_a_waiting_prompt_that_is_too_long_to_share() -> None:
    driver = make_driver()
    long_prompt(driver)
    newcomer(driver, "long too", prompt=150)
    newcomer(driver, "short")
    assert schedule(driver) == {"long": BUDGET}
    driver.run()


def test_one_that_shares_leaves_half_of_its_half_and_takes_what_comes_back() -> None:
    driver = make_driver()
    long = long_prompt(driver)
    newcomer(driver, "middle", prompt=60)
    newcomer(driver, "short", prompt=5)
    assert schedule(driver) == {"long": 16, "middle": 11, "short": 5}
    assert schedule(driver) == {"long": 16, "middle": 15, "short": 1}
    while not driver.delivered["middle"]:
        driver.step()
    assert len(driver.delivered[long.request_id]) == 0
    driver.run()


def test_tokens_in_the_cache_do_not_count() -> None:
    driver = make_driver()
    driver.add(make_request("before", prompt=[3] * 120, max_tokens=1))
    driver.run()
    long_prompt(driver)
    driver.add(make_request("after", prompt=[3] * 120, arrival_time=driver.now))
    assert schedule(driver) == {"long": BUDGET - 4, "after": 4}
    driver.run()


def test_prompts_that_fit_leave_nothing() -> None:
    driver = make_driver()
    for name in ("a", "b"):
        newcomer(driver, name, prompt=BUDGET)
    newcomer(driver, "c", prompt=1)
    assert [schedule(driver), schedule(driver)] == [{"a": 32}, {"a": 1, "b": 30, "c": 1}]
    driver.run()


def test_a_limit_of_one_request_below_what_is_left_is_share_enough() -> None:
    driver = make_driver(long_prefill_token_threshold=24)
    long_prompt(driver)
    newcomer(driver, prompt=150)
    assert schedule(driver) == {"long": 24, "short": 8}
    driver.run()


def test_a_step_of_one_token_belongs_to_the_long_prompt() -> None:
    driver = make_driver(max_num_batched_tokens=2)
    newcomer(driver, "decode", prompt=1, max_tokens=40)
    driver.step()
    driver.add(make_request("long", prompt=[1] * 20, max_tokens=1))
    assert schedule(driver) == {"decode": 1, "long": 1}
    driver.run()


def test_sharing_takes_no_more_steps() -> None:
    """All steps are full until the last prompt is computed, so others pay for nothing."""
    driver = make_driver()
    long_prompt(driver)
    requests = [newcomer(driver, f"s{number}", prompt=9 + number, max_tokens=1) for number in range(8)]
    num_tokens = LONG - BUDGET + sum(request.num_prompt_tokens for request in requests)
    steps = []
    while not driver.delivered["long"]:
        steps.append(sum(schedule(driver).values()))
    assert steps == [BUDGET] * (num_tokens // BUDGET) + [num_tokens % BUDGET]
    assert all(request.is_finished for request in requests)
    driver.run()


def test_two_that_are_cut_share_with_what_both_would() -> None:
    """A prompt lifted to HIGH lets its requested class share, but not with a prompt that is HIGH itself."""
    plan = StepPlan(StepLimits(BUDGET, BUDGET, max_running=8, max_joins=8, max_scores=8, keep_free=0))
    plan.add_chunk(0, 0, 4 * BUDGET, (HIGH,))
    plan.add_chunk(1, 0, BUDGET, (NORMAL,))
    assert plan.may_share((HIGH,)) and not plan.may_share((NORMAL,))
