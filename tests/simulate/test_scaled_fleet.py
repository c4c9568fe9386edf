"""Replicas that come and go: each request is answered once, none goes to a draining replica, all time is counted."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.long_runs import examples
from support.simulate.simulation import make_trace, simulator
from tidewheel.errors import InternalError
from tidewheel.fleet.scaling import FleetState, ScalingSettings
from tidewheel.request import Priority
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.fleet import ScalingPlan
from tidewheel.simulate.fleet_choice import make_scaling
from tidewheel.simulate.outcomes import FINISHED
from tidewheel.simulate.simulator import Simulator

ROUTERS = ("round-robin", "least-loaded", "session-affinity", "prefix-aware")
COARSE = pytest.mark.parametrize("is_coarse", [False, True], ids=["exact", "coarse"])


class Script:
    """Numbers in turn; the last one stays."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self.states: list[FleetState] = []

    def decide(self, state: FleetState) -> int:
        self.states.append(state)
        return self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]


def scripted(numbers: Sequence[int], *, startup_s: float = 0.3, **others: object) -> tuple[Simulator, Script]:
    script = Script(numbers)
    trace = make_trace(150, rate=40.0)
    plan = ScalingPlan(script, startup_s, decide_every_s=0.25)
    return simulator(trace, scaling=plan, **{"num_replicas": 1, **others}), script  # type: ignore[arg-type]


def sent_at(run: Simulator) -> dict[int, list[float]]:
    """Return when requests were sent to each replica; to be asked for before the run."""
    times: dict[int, list[float]] = defaultdict(list)
    sent = run.fleet.sent

    def note(number: int) -> None:
        times[number].append(run.now)
        sent(number)

    run.fleet.sent = note  # type: ignore[method-assign]
    return times


@COARSE
@pytest.mark.parametrize("router", ROUTERS)
@settings(max_examples=examples(3, 10))
@given(numbers=st.lists(st.integers(0, 4), min_size=1, max_size=20), last=st.integers(1, 3))
def test_each_request_is_answered_once_whatever_comes_and_goes(
    router: str, is_coarse: bool, numbers: list[int], last: int
) -> None:
    run, _ = scripted([*numbers, last], router=router, is_coarse=is_coarse)
    outcomes = run.run()
    assert (outcomes.ends == FINISHED).all()
    np.testing.assert_array_equal(outcomes.output_tokens, outcomes.trace.output_tokens)
    assert (outcomes.first_scheduled >= outcomes.trace.arrivals).all()


@COARSE
def test_a_draining_replica_gets_nothing_new_ends_its_own_and_leaves(is_coarse: bool) -> None:
    run, _ = scripted([4, 4, 4, 1, 1, 1, 3, 3, 2], is_coarse=is_coarse, router="round-robin")
    times = sent_at(run)
    outcomes = run.run()
    gone = [number for number, stay in enumerate(run.fleet.stays) if stay.end < run.now]
    assert len(gone) >= 3
    removed_at = {0.75: 3, 2.0: 1}  # decision → replicas given up
    for number in gone:
        stay = run.fleet.stays[number]
        lasts = outcomes.last_token[outcomes.replicas == number]
        drained_at = max((at for at in removed_at if at <= stay.end + 1e-9), default=0.0)
        assert all(at <= drained_at for at in times[number])
        assert stay.end >= drained_at
        assert all(lasts <= stay.end + 0.05)
    assert any(run.fleet.stays[number].end not in removed_at for number in gone)  # one had requests to end


@COARSE
def test_a_new_replica_gets_requests_only_once_it_has_started(is_coarse: bool) -> None:
    run, script = scripted([3], startup_s=1.0, is_coarse=is_coarse, router="round-robin")
    times = sent_at(run)
    run.run()
    assert {number: stay.begin for number, stay in enumerate(run.fleet.stays)} == {0: 0.0, 1: 0.0, 2: 0.0}
    assert min(times[1]) >= 1.0 and min(times[2]) >= 1.0 and min(times[0]) < 0.2
    assert [state.num_starting for state in script.states[:6]] == [0, 2, 2, 2, 0, 0]
    assert [len(state.ready) for state in script.states[:6]] == [1, 1, 1, 1, 3, 3]


@COARSE
def test_requests_wait_for_the_first_replica(is_coarse: bool) -> None:
    run, script = scripted([0, 0, 2], num_replicas=0, startup_s=0.5, is_coarse=is_coarse)
    outcomes = run.run()
    assert (outcomes.ends == FINISHED).all()
    early = outcomes.trace.arrivals < 1.0
    assert early.sum() > 10 and (outcomes.first_scheduled[early] >= 1.0).all()
    assert script.states[0].num_held == 0 < script.states[2].num_held


def test_requests_that_no_replica_will_ever_take_are_an_error() -> None:
    run, _ = scripted([0], num_replicas=0)
    with pytest.raises(InternalError, match="150 requests wait for a replica, and none comes"):
        run.run()


def test_a_starting_replica_that_is_not_needed_never_serves() -> None:
    run, _ = scripted([3, 1], startup_s=10.0)
    times = sent_at(run)
    run.run()
    assert set(times) == {0}
    assert [stay.end for stay in run.fleet.stays[1:]] == [0.25, 0.25]


def test_replica_seconds_count_starts_and_drains() -> None:
    run, _ = scripted([2, 2, 1], startup_s=0.1)
    run.run()
    first, second = run.fleet.stays
    left = next(stay for stay in (first, second) if stay.end < np.inf)
    assert left.begin == 0.0 and left.end >= 0.5
    assert run.fleet.replica_seconds(run.now) == pytest.approx(run.now + left.end)
    assert run.summary()["replicas"]["hours"] == pytest.approx((run.now + left.end) / 3600)


@COARSE
def test_reports_tell_rates_and_waiting_requests(is_coarse: bool) -> None:
    """The rates add up to all tokens, and the ages of waiting requests are told by class."""
    script = Script([1])
    trace = make_trace(200, rate=200.0)
    priorities = np.where(np.arange(200) % 2, Priority.HIGH, Priority.LOW).astype(np.int32)
    trace = dataclasses.replace(trace, priorities=priorities)
    run = simulator(trace, scaling=ScalingPlan(script, 1.0, decide_every_s=0.25), is_coarse=is_coarse)
    outcomes = run.run()
    computed = 0.25 * sum(report.tokens_per_s for state in script.states for report in state.ready)
    assert computed == pytest.approx(run.replicas[0].num_tokens, rel=0.1)
    (report,) = script.states[2].ready
    assert report.running > 0 and report.waiting > 20 and 0 < report.cache_usage <= 1
    assert script.states[2].num_arrivals == (trace.arrivals <= 0.5).sum()
    never = np.flatnonzero((trace.arrivals <= 0.5) & (outcomes.first_scheduled > 0.5) & (priorities == Priority.LOW))
    assert report.queue_s[Priority.LOW] == pytest.approx(0.5 - trace.arrivals[never[0]], abs=0.02)


@COARSE
def test_the_reactive_policy_follows_a_burst_and_falls_back(is_coarse: bool) -> None:
    settings_ = ScalingSettings(max_replicas=4, startup_s=1.0, scale_down_after_s=5.0, cool_down_s=1.0)
    quiet, busy = make_trace(60, rate=2.0), make_trace(1200, rate=150.0)
    arrivals = np.concatenate((quiet.arrivals, 10 + busy.arrivals))
    order = np.argsort(arrivals)
    columns = {
        name: np.concatenate((getattr(quiet, name), getattr(busy, name)))[order]
        for name in ("prompt_tokens", "output_tokens")
    }
    trace = dataclasses.replace(make_trace(1260), arrivals=arrivals[order], **columns)
    plan = ScalingPlan(make_scaling("reactive", settings_), 1.0, decide_every_s=1.0)
    run = simulator(trace, scaling=plan, is_coarse=is_coarse, router="least-loaded")
    assert (run.run().ends == FINISHED).all()
    counts = dict(run.fleet.changes)
    assert max(counts.values()) >= 3
    assert run.fleet.changes[-1][1] == 1 and run.fleet.changes[-1][0] < 29


@pytest.mark.parametrize("rate", [5.0, 20.0, 60.0])
def test_merged_steps_change_little(rate: float) -> None:
    """A coarse replica has the exact one's latencies within 5 % and the same steps, up to how they are grouped."""
    cost = CostModel(
        name="device",
        overhead_s=0.01,
        seconds_per_token=(1e-4,),
        seconds_per_kv_byte=1e-6,
        seconds_per_chunk_pair=1e-7,
    )
    trace = make_trace(400, rate=rate, output="geometric:20")
    exact, coarse = (
        simulator(trace, cost=cost, is_coarse=is_coarse, num_blocks=400, enable_prefix_caching=False)
        for is_coarse in (False, True)
    )
    one, other = exact.run(), coarse.run()
    assert other.ttft.mean() == pytest.approx(one.ttft.mean(), rel=0.05)
    assert other.latency.mean() == pytest.approx(one.latency.mean(), rel=0.05)
    assert coarse.replicas[0].num_steps == pytest.approx(exact.replicas[0].num_steps, rel=0.03)
    assert coarse.replicas[0].num_tokens == exact.replicas[0].num_tokens


def test_one_request_alone_takes_the_same_time_in_merged_steps() -> None:
    trace = make_trace(1, prompt="constant:80", output="constant:50")
    cost = CostModel(name="device", overhead_s=0.01, seconds_per_token=(1e-4,), seconds_per_kv_byte=1e-6)
    one, other = (simulator(trace, cost=cost, is_coarse=is_coarse).run() for is_coarse in (False, True))
    assert other.ttft[0] == pytest.approx(one.ttft[0], rel=1e-9)
    assert other.latency[0] == pytest.approx(one.latency[0], rel=1e-9)


def test_one_seed_gives_one_result_with_replicas_that_come_and_go() -> None:
    runs = [scripted([3, 3, 0, 2, 1], router="least-loaded")[0] for _ in range(2)]
    first, second = (run.run() for run in runs)
    np.testing.assert_array_equal(first.replicas, second.replicas)
    np.testing.assert_array_equal(first.last_token, second.last_token)
    assert runs[0].fleet.changes == runs[1].fleet.changes


def test_a_last_chunk_of_one_token_costs_no_pairs_in_merged_steps() -> None:
    cost = CostModel(name="device", overhead_s=0.01, seconds_per_chunk_pair=1e-3)
    trace = make_trace(1, prompt="constant:33", output="constant:2")  # a step has 32 tokens
    one, other = (simulator(trace, cost=cost, is_coarse=is_coarse).run() for is_coarse in (False, True))
    assert other.latency == pytest.approx(one.latency)
