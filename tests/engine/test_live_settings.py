"""Settings that change between two steps, while requests wait, run and are in flight."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engine.core_harness import CoreHarness, Event, arrivals
from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import make_config, make_request
from tidewheel.errors import Busy, InternalError, InvalidRequest, NotFound, WaitingSetFull
from tidewheel.kvcache.sessions import SessionLimits
from tidewheel.request import FinishReason, Priority, Request
from tidewheel.scheduler.policy import POLICIES
from tidewheel.tenants import TenantLimits

STARTED = {"max_num_seqs": 6, "max_num_batched_tokens": 24}


def reconfigure(harness: CoreHarness, changes: Mapping[str, Any]) -> None:
    config = make_config(**{**STARTED, **changes})
    harness.scheduler.reconfigure(config, SessionLimits(tenants=config.tenants))


@st.composite
def settings(draw: st.DrawFn) -> dict[str, object]:
    tenants = {name: TenantLimits(weight=draw(st.integers(1, 9))) for name in draw(st.sets(st.sampled_from("ab*")))}
    return {
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(1, 24)),
        "policy": draw(st.sampled_from(sorted(POLICIES))),
        "scheduling_strategy": draw(st.sampled_from(["continuous", "dynamic", "hybrid"])),
        "ageing_s": draw(st.sampled_from([0.5, 10.0])),
        "max_waiting_requests": draw(st.integers(14, 40)),
        "long_prefill_token_threshold": draw(st.sampled_from([None, 3])),
        "enable_seqs_governor": draw(st.booleans()),
        "target_tpot_ms": draw(st.sampled_from([None, 500.0])),
        "breaker_queue_time_s": draw(st.sampled_from([None, 100.0])),
        "tenants": tenants,
    }


def try_to_add(harness: CoreHarness, request: Request) -> None:
    with contextlib.suppress(Busy, InvalidRequest):  # by a lowered limit
        harness.add(request)


@given(
    events=arrivals(),
    changes=st.lists(st.tuples(st.integers(0, 40), settings()), max_size=6),
    max_inflight_steps=st.sampled_from([1, 2]),
)
def test_any_change_at_any_moment_harms_no_request(
    events: list[Event], changes: list[tuple[int, dict[str, Any]]], max_inflight_steps: int
) -> None:
    fixed = {"max_inflight_steps": max_inflight_steps, "max_waiting_requests": 40}
    harness = CoreHarness(**STARTED, **fixed)
    for kind, value in events:
        if isinstance(value, Request):
            harness.commands.append(functools.partial(try_to_add, harness, value))
        else:
            harness.play([(kind, value)])
    for position, change in changes:
        harness.commands.insert(position, functools.partial(reconfigure, harness, {**fixed, **change}))
    harness.run()
    assert FinishReason.ERROR not in harness.ended.values()


def test_a_lowered_number_of_requests_lets_the_running_ones_end() -> None:
    harness = CoreHarness(**STARTED)
    for name in "abcd":
        harness.add(make_request(name, 4, max_tokens=5))
    harness.core.step()
    reconfigure(harness, {"max_num_seqs": 1})
    harness.add(make_request("e", 4, max_tokens=5))
    harness.core.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (4, 1)
    reconfigure(harness, {"max_num_seqs": 5})
    harness.core.step()
    assert harness.scheduler.num_running == 5
    harness.run()


def test_a_budget_below_the_running_requests() -> None:
    harness = CoreHarness(**STARTED)
    for name in "abcd":
        harness.add(make_request(name, 4, max_tokens=3))
    harness.core.step()
    reconfigure(harness, {"max_num_batched_tokens": 2})
    harness.core.step()
    assert {name: len(tokens) for name, tokens in harness.delivered.items()} == dict.fromkeys("abcd", 2)
    harness.run()


def test_more_rows_than_there_are_is_an_error() -> None:
    with pytest.raises(InternalError, match="7 rows"):
        reconfigure(CoreHarness(**STARTED), {"max_num_seqs": 7})


def test_a_lowered_waiting_set_evicts_nothing() -> None:
    harness = CoreHarness(**STARTED)
    for index in range(20):
        harness.add(make_request(str(index), 4, priority=Priority.LOW, max_tokens=2))
    reconfigure(harness, {"max_waiting_requests": 5, "max_waiting_tokens": 20})
    with pytest.raises(WaitingSetFull, match="20 of 5 requests"):
        harness.core.add_group([make_request("low", 4, priority=Priority.LOW)])
    harness.add(make_request("high", 4, priority=Priority.HIGH, max_tokens=2))
    assert list(harness.ended.values()) == [FinishReason.ERROR]  # as many as came
    harness.run()


def started(harness: CoreHarness) -> list[str]:
    return [name for name, tokens in harness.delivered.items() if tokens]


def test_the_waiting_set_is_ordered_by_the_new_policy() -> None:
    harness = CoreHarness(max_num_seqs=1, policy="fifo")
    for name, priority in (("first", Priority.NORMAL), ("low", Priority.LOW), ("high", Priority.HIGH)):
        harness.add(make_request(name, 4, priority=priority, max_tokens=1))
    harness.core.step()
    harness.scheduler.reconfigure(make_config(max_num_seqs=1, policy="priority"), SessionLimits())
    harness.core.step()
    assert started(harness) == ["first", "high"]
    harness.run()


def test_tenants_keep_what_they_have_used() -> None:
    tenants = {"a": TenantLimits(requests_per_s=0.01)}
    harness = CoreHarness(tenants=tenants)
    harness.add(make_request("1", 4, tenant="a", max_tokens=1))
    faster = {"a": TenantLimits(requests_per_s=0.02, weight=3.0), "b": TenantLimits()}
    harness.scheduler.reconfigure(make_config(tenants=faster), SessionLimits(tenants=faster))
    with pytest.raises(Busy, match="requests_per_s"):
        harness.core.add_group([make_request("2", 4, tenant="a")])
    harness.run()
    figures = harness.scheduler.stats().tenants
    assert figures["a"].num_started == 1
    assert figures["b"].num_requests == 0


def test_sessions_above_a_lowered_limit_are_given_up() -> None:
    harness = CoreHarness()
    for name in "ab":
        harness.add(make_request(name, 4, session_id=name, session_ttl=1e6, max_tokens=1))
        harness.run()
    harness.scheduler.reconfigure(make_config(), SessionLimits(max_sessions=1))
    check_invariants(harness.scheduler)
    with pytest.raises(NotFound):
        harness.scheduler.close_session("", "a")
    harness.scheduler.close_session("", "b")
    harness.run()
