"""The event loop: every request ends once, one seed gives one result, and a single server obeys queueing theory."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from support.long_runs import slow
from support.simulate.simulation import COST, make_trace, simulate, simulator
from tidewheel.errors import InternalError
from tidewheel.request import Priority
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.outcomes import FINISHED, REFUSED, SimulationOutcomes, mean_in_system, throughput
from tidewheel.workload.traces import NOBODY, PrefixMix, Trace

CASES = [
    {},
    {"num_replicas": 3, "router": "least-loaded"},
    {"max_inflight_steps": 2},
    {"num_blocks": 12},  # preemptions
    {"num_blocks": 12, "max_inflight_steps": 2},
    {"enable_prefix_caching": False},
    {"policy": "fifo", "num_replicas": 2},
]


def columns(trace: Trace, **settings: object) -> list[np.ndarray]:
    outcomes = simulate(trace, **settings)
    return [outcomes.ends, outcomes.replicas, outcomes.first_scheduled, outcomes.first_token, outcomes.last_token]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_one_seed_gives_one_result(settings: dict[str, object]) -> None:
    first, second = columns(make_trace(), **settings), columns(make_trace(), **settings)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_every_request_ends_once_with_its_tokens(settings: dict[str, object]) -> None:
    trace = make_trace(200, rate=100.0)
    run = simulator(trace, **settings)
    outcomes = run.run()
    assert (outcomes.ends == FINISHED).all()
    np.testing.assert_array_equal(outcomes.output_tokens, trace.output_tokens)
    assert (outcomes.first_scheduled >= trace.arrivals).all()
    assert (outcomes.first_token > outcomes.first_scheduled).all()
    assert (outcomes.last_token >= outcomes.first_token).all()
    if settings.get("num_blocks"):
        assert outcomes.preemptions.sum() > 0


def test_no_step_is_skipped() -> None:
    """One request alone: one step for its prompt and one for each further token."""
    trace = make_trace(1, prompt="constant:8", output="constant:5")
    run = simulator(trace)
    outcomes = run.run()
    assert run.replicas[0].num_steps == 5
    prefill = COST.overhead_s + 8 * 1e-4
    assert outcomes.ttft[0] == pytest.approx(prefill)
    assert outcomes.tpot[0] == pytest.approx(COST.overhead_s + 1e-4 + COST.turn_overhead_s)


def test_two_batches_in_flight_hide_the_host() -> None:
    trace = make_trace(1, prompt="constant:8", output="constant:50")
    one, two = simulate(trace), simulate(trace, max_inflight_steps=2)
    assert two.tpot[0] == pytest.approx(one.tpot[0] - COST.turn_overhead_s)


def test_a_full_waiting_set_refuses_and_the_rest_ends() -> None:
    trace = make_trace(100, rate=10_000.0)
    outcomes = simulate(trace, max_waiting_requests=10)
    assert {FINISHED, REFUSED} == set(outcomes.ends.tolist())
    assert np.isnan(outcomes.first_token[outcomes.ends == REFUSED]).all()
    assert (outcomes.output_tokens[outcomes.ends == FINISHED] == trace.output_tokens[outcomes.ends == FINISHED]).all()


def test_a_shared_prefix_is_computed_once_on_each_replica() -> None:
    trace = make_trace(40, rate=2.0, prefixes=PrefixMix(1, 32))
    outcomes = simulate(trace, num_replicas=2, router="round-robin")
    assert (outcomes.cached_tokens[2:] >= 32).all()
    assert (outcomes.cached_tokens[:2] == 0).all()


def test_a_later_turn_of_a_session_finds_what_was_said() -> None:
    single = make_trace(2, rate=0.1, prompt="constant:16", output="constant:9")
    trace = dataclasses.replace(
        single,
        prompt_tokens=np.array([16, 40], dtype=np.int32),
        sessions=np.zeros(2, dtype=np.int32),
        session_names=("s",),
    )
    assert (single.sessions == NOBODY).all()
    assert simulate(trace).cached_tokens[1] >= 24  # the full blocks of 16 + 9 tokens but the last one
    assert simulate(single).cached_tokens[1] == 0


def test_classes_are_served_in_order_under_load() -> None:
    trace = make_trace(300, rate=1000.0)
    priorities = np.where(np.arange(300) % 3 == 0, Priority.CRITICAL, Priority.LOW).astype(np.int32)
    outcomes = simulate(dataclasses.replace(trace, priorities=priorities))
    critical = priorities == Priority.CRITICAL
    assert outcomes.ttft[critical].mean() < 0.7 * outcomes.ttft[~critical].mean()


def test_quantised_weights_under_pressure_lose_fewer_requests_and_full_ones_come_back() -> None:
    trace = make_trace(300, rate=20.0, output="constant:20")  # full weights finish 16 a second, quantised ones 25
    cost = dataclasses.replace(COST, quantized_share=0.6)
    limited = {"cost": cost, "max_waiting_requests": 16}
    plain = simulate(trace, **limited)
    run = simulator(trace, **limited, has_quantized_copy=True)
    helped = run.run()
    (replica,) = run.replicas
    stats = replica.scheduler.stats()
    assert 0 < stats.num_quantized_steps < stats.num_steps
    assert np.count_nonzero(helped.ends == REFUSED) < 0.2 * np.count_nonzero(plain.ends == REFUSED)


class Server(NamedTuple):
    load: float  # as the seed has drawn it
    mean_in_system: float  # by Little's law


def single_server(load: float, output: str, mean: float, count: int) -> Server:
    """One row, 10 ms a token."""
    cost = CostModel(name="server", overhead_s=0.010)
    trace = make_trace(count, load / (mean * 0.010), prompt="constant:1", output=output, seed=5)
    outcomes = simulate(
        trace,
        cost=cost,
        max_num_seqs=1,
        policy="fifo",
        enable_prefix_caching=False,
        num_blocks=200,
        max_waiting_requests=10**6,
    )
    span = float(outcomes.last_token.max() - trace.arrivals[0])
    offered = float(trace.output_tokens.sum()) * cost.overhead_s / float(trace.arrivals[-1])
    return Server(offered, float(outcomes.latency.sum() / span))


@pytest.mark.parametrize("load", [*slow([0.5]), 0.7])
def test_one_row_and_geometric_lengths_are_nearly_an_mm1_queue(load: float) -> None:
    """A geometric number of steps is the exponential of discrete time: squared coefficient of variation 1 - 1/mean.
    3,000 requests of a fixed seed come within 10 % of Pollaczek and Khinchine's formula, and 20 % of M/M/1."""
    server = single_server(load, "geometric:8", 8, 3_000)
    assert server.load == pytest.approx(load, rel=0.05)
    assert server.mean_in_system == pytest.approx(mean_in_system(server.load, 1 - 1 / 8), rel=0.10)
    assert server.mean_in_system == pytest.approx(mean_in_system(server.load), rel=0.20)


def test_one_row_and_constant_lengths_are_an_md1_queue() -> None:
    server = single_server(0.7, "constant:4", 4, 3_000)
    assert server.mean_in_system == pytest.approx(mean_in_system(server.load, 0.0), rel=0.08)


def test_heavy_tails_make_longer_queues_at_the_same_load() -> None:
    server = single_server(0.7, "lognormal:8:1.2:200", 8, 2_000)
    assert server.mean_in_system > 1.3 * mean_in_system(server.load)


def test_a_request_that_ends_twice_is_an_error() -> None:
    run = simulator(make_trace(1))
    outcomes = run.run()
    with pytest.raises(InternalError, match="request 0 ended twice"):
        run._ended(0, run._requests.request(0, 0.0))
    assert outcomes.ends[0] == FINISHED


def test_ramp_up_and_drain_are_no_part_of_the_throughput() -> None:
    count = 100
    outcomes = SimulationOutcomes(Trace.of(np.zeros(count), np.ones(count), np.ones(count)))
    outcomes.ends[:] = FINISHED
    full, drain = 10.0 + 0.5 * np.arange(80), 60.0 + 5.0 * np.arange(20)
    outcomes.last_token[:] = np.random.default_rng(1).permutation([*full, *drain])
    assert throughput(outcomes) == pytest.approx(1 / 0.5)
    assert count / outcomes.span < 0.5 * throughput(outcomes)
