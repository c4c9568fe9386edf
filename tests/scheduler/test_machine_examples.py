"""Lives in which the state machine once found a broken promise. They are short enough to run every time."""

from __future__ import annotations

from typing import Any, Literal

from support.scheduler.scheduler_machine import SchedulerMachine
from tidewheel.request import Priority

CRITICAL, HIGH, NORMAL, LOW = Priority
PREFIXES: dict[str, Any] = {
    "enable_prefix_caching": True,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 8,
    "max_inflight_steps": 1,
    "policy": "priority",
    "watermark": 0.25,
    "admit_by_growth": False,
    "ageing_s": 1000.0,
    "max_preemptions": 4,
    "long_prefill_token_threshold": None,
    "num_host_blocks": 0,
    "scheduling_strategy": "continuous",
    "enable_seqs_governor": False,
    "target_tpot_ms": None,
}

# So many steps, or half of one; so many arrivals of a class; a group of so many sequences.
Event = int | Literal["schedule", "apply"] | tuple[Priority, int] | tuple[Priority, int, str]


def live(*events: Event, pool: tuple[int, int] = (29, 4), seed: int = 82, **changes: Any) -> SchedulerMachine:
    machine = SchedulerMachine()
    machine.start(settings=PREFIXES | changes, pool=pool, seed=seed)
    for event in events:
        match event:
            case int(count):
                machine.steps(count=count)
            case str(half):
                getattr(machine, half)()
            case (priority, count):
                machine.add(count=count, priority=priority)
            case (priority, count, _):
                machine.add_some(count=count, priority=priority)
        machine.keeps_its_promises()
    machine.teardown()
    return machine


def group(priority: Priority, count: int) -> tuple[Priority, int, str]:
    return priority, count, "group"


def test_the_victim_that_needs_a_block_itself_has_computed_least() -> None:
    machine = live(
        *[group(CRITICAL, 2), group(CRITICAL, 2), group(HIGH, 2), group(CRITICAL, 2)],
        *[(NORMAL, 3), (LOW, 1), group(CRITICAL, 2), 7, 3],
        *[(CRITICAL, 2), 8, group(HIGH, 2), 7, (NORMAL, 3), 8, (NORMAL, 2), 2],
        *[group(CRITICAL, 4), 7, (CRITICAL, 2), 1],
    )
    assert machine.driver.scheduler.stats().num_preemptions > 0


def test_a_sibling_of_a_started_sequence_does_not_enter_before_a_prompt_that_is_cut_short() -> None:
    machine = live(
        *[group(CRITICAL, 2), 2, group(CRITICAL, 2), 2, group(CRITICAL, 2), (CRITICAL, 2), 2, 3],
        *[group(CRITICAL, 2), 6, (CRITICAL, 1), group(CRITICAL, 2), 2, (CRITICAL, 3), 4],
    )
    assert machine.driver.scheduler.stats().num_prefix_hits > 0


def test_a_cached_prefix_does_not_overtake_a_sibling_of_a_started_sequence() -> None:
    machine = live(
        *[group(CRITICAL, 2), (CRITICAL, 3), group(CRITICAL, 2), group(CRITICAL, 2), group(CRITICAL, 2), 1, 3],
        *[group(CRITICAL, 2), 3, (CRITICAL, 1), group(CRITICAL, 2), 2, (CRITICAL, 2), 1],
        max_num_seqs=4,
    )
    assert machine.driver.scheduler.stats().num_prefix_hits > 0


def test_a_request_of_a_lower_class_waits_for_a_block_while_a_higher_one_leaves() -> None:
    machine = live(
        *[group(CRITICAL, 2), group(CRITICAL, 4), group(CRITICAL, 2), group(CRITICAL, 3)],
        *["schedule", "apply", "schedule", (CRITICAL, 1), "apply", (CRITICAL, 1), group(CRITICAL, 2)],
        *["schedule", "apply", "schedule", "apply", group(CRITICAL, 2), 4],
        pool=(32, 1),
        seed=0,
        watermark=0.0,
    )
    assert machine.driver.scheduler.stats().num_preemptions > 0


def test_a_step_that_lacks_blocks_admits_no_request_although_a_victim_frees_more_than_is_needed() -> None:
    machine = live(
        *[group(CRITICAL, 2), group(CRITICAL, 4), group(CRITICAL, 2), group(CRITICAL, 3)],
        *["schedule", (CRITICAL, 1), 2, 6, "schedule", "apply", (HIGH, 1), 2],
        pool=(16, 2),
        seed=0,
        watermark=0.0,
        max_num_seqs=4,
        max_preemptions=1,
    )
    assert machine.driver.scheduler.stats().num_preemptions > 0


def test_a_victim_is_needed_where_another_that_shares_its_blocks_has_just_expired() -> None:
    machine = live(
        *[group(CRITICAL, 2), "schedule", (CRITICAL, 1), (CRITICAL, 3), "apply", group(HIGH, 2)],
        *["schedule", "apply", (CRITICAL, 2), (CRITICAL, 4), 6, "schedule", (CRITICAL, 1), (CRITICAL, 4), 6],
        pool=(14, 2),
        seed=27,
        policy="sjf",
        max_num_seqs=4,
        max_num_batched_tokens=4,
        ageing_s=10.0,
        max_preemptions=1,
    )
    assert machine.driver.scheduler.stats().num_expired > 0


def test_a_critical_request_waits_for_a_block_to_hold_the_tail_of_its_session() -> None:
    machine = live(
        *[(HIGH, 1), 3, (CRITICAL, 2), (CRITICAL, 3), 2],
        pool=(5, 16),
        seed=89,
        max_num_seqs=4,
        max_num_batched_tokens=24,
    )
    assert machine.driver.scheduler.stats().num_sessions > 0
