"""A near and a far replica in the simulator: a tier overflows at load only, and all of it comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.simulate.simulation import make_trace, simulator
from tidewheel.batch import BoolArray, Float64Array
from tidewheel.fleet.router import RoutedRequest, RouteRequest
from tidewheel.fleet.routers import ReplicaTerms, TieredRouter
from tidewheel.fleet.scaling import QUEUE_LIMITS_S
from tidewheel.request import Priority
from tidewheel.simulate.simulator import Simulator
from tidewheel.workload.traces import Trace

ROUND_TRIP_S = 0.1
CAPACITY = 37.0  # requests/s of a replica
ENGINE = {"num_blocks": 2000, "max_num_seqs": 8, "max_waiting_requests": 100, "max_num_batched_tokens": 1024}
LOAD: dict[str, Any] = {"prompt": "constant:24", "output": "lognormal:16:1:100"}
OBJECTIVE_S = QUEUE_LIMITS_S[Priority.NORMAL]


class Run:
    """Replica and first-token time of each request; a far one's has the round trip added."""

    def __init__(self, trace: Trace, *, num_far: int = 1) -> None:
        terms = [ReplicaTerms(0, 0.0), *(ReplicaTerms(1, ROUND_TRIP_S) for _ in range(num_far))]
        simulators: list[Simulator] = []
        replicas: list[int] = []

        class Noting(TieredRouter[int]):
            def chosen(self, request: RouteRequest, replica: int) -> RoutedRequest[int]:
                replicas.append(replica)
                return super().chosen(request, replica)

        router = Noting(terms.__getitem__, lambda: simulators[0].now)
        simulators.append(simulator(trace, num_replicas=len(terms), router=router, **ENGINE))  # type: ignore[arg-type]
        outcomes = simulators[0].run()
        self.is_far: BoolArray = np.array(replicas) > 0
        self.first_token_s: Float64Array = outcomes.first_token - trace.arrivals + ROUND_TRIP_S * self.is_far

    @property
    def share_in_time(self) -> float:
        return float(np.mean(np.nan_to_num(self.first_token_s, nan=np.inf) <= OBJECTIVE_S))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_nothing_goes_far_at_low_load_and_nothing_changes_near(load: float) -> None:
    trace = make_trace(1000, rate=load * CAPACITY, **LOAD)
    both, alone = Run(trace), Run(trace, num_far=0)
    assert not both.is_far.any()
    assert np.array_equal(both.first_token_s, alone.first_token_s)


@pytest.mark.parametrize("seed", range(2))
def test_at_twice_the_near_capacity_far_ones_take_the_rest(seed: int) -> None:
    trace = make_trace(2000, rate=1.7 * CAPACITY, seed=seed, **LOAD)
    both, alone = Run(trace), Run(trace, num_far=0)
    assert alone.share_in_time < 0.3
    assert both.share_in_time > 0.99
    assert 0.3 < both.is_far.mean() < 0.5, "the near one stays busy"
    assert np.quantile(both.first_token_s, 0.95) < OBJECTIVE_S / 2
    tenths = [part.mean() for part in np.array_split(both.is_far, 10)]
    assert max(tenths) < 3 * min(tenths), "a share, not one server after the other"


def test_all_come_back_after_a_peak() -> None:
    rates = np.repeat([0.5, 2.0, 0.5], [400, 800, 400]) * CAPACITY
    trace = make_trace(len(rates), rate=1.0, **LOAD)
    trace.arrivals[:] = np.cumsum(1 / rates)
    before, peak, after = np.split(Run(trace).is_far, [400, 1200])
    assert not before.any() and 0.3 < peak.mean() < 0.6
    assert not after[20:].any()


def test_conversations_change_their_server_seldom() -> None:
    trace = make_trace(2000, rate=1.7 * CAPACITY, **LOAD)
    sessions = {"sessions": np.arange(2000, dtype=np.int32) % 50, "session_names": tuple(f"s{n}" for n in range(50))}
    trace = Trace(**{name: getattr(trace, name) for name in trace.__dataclass_fields__} | sessions)
    run = Run(trace)
    changes = [np.count_nonzero(np.diff(run.is_far[number::50])) / 39 for number in range(50)]
    loose = Run(make_trace(2000, rate=1.7 * CAPACITY, **LOAD))
    at_random = 2 * loose.is_far.mean() * (1 - loose.is_far.mean())
    assert np.mean(changes) < at_random / 2
