"""Figures of replicas, and Ray Serve's contexts as the policies see them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_settings import ClusterSettings
from tidewheel.cluster.ray_scaling import RayScaling, figures_of, queue_s
from tidewheel.cluster.serve_app import Replica
from tidewheel.errors import ConfigError
from tidewheel.fleet.scaling import FleetState
from tidewheel.health_endpoint import READY
from tidewheel.request import Priority
from tidewheel.server.endpoints import Endpoints


class Name(NamedTuple):
    unique_id: str


class Recorder:
    """Policy that keeps what it saw."""

    def __init__(self) -> None:
        self.states: list[FleetState] = []

    def decide(self, state: FleetState) -> int:
        self.states.append(state)
        return 3


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def scaling(recorder: Recorder) -> RayScaling:
    one = RayScaling("reactive", {"max_replicas": 4}, clock=lambda: 7.0)
    one._policy = recorder
    return one


def context(target: int, moment: float, **figures: dict[str, float]) -> Any:
    """Return one with a report of each named replica at a moment."""
    names = {name for by_replica in figures.values() for name in by_replica}
    raw = {
        figure: {Name(name): [SimpleNamespace(timestamp=moment, value=value)] for name, value in by_replica.items()}
        for figure, by_replica in figures.items()
    }
    return SimpleNamespace(
        running_replicas=[Name(name) for name in sorted(names)],
        target_num_replicas=target,
        raw_metrics=raw,
        total_queued_requests=2.0,
    )


def test_reports_become_a_state(scaling: RayScaling, recorder: Recorder) -> None:
    wanted, kept = scaling(context(3, 10.0, running={"a": 4.0, "b": 0.0}, waiting={"a": 9.0}, kv_use={"a": 0.5}))
    assert (wanted, kept) == (3, {})
    (state,) = recorder.states
    assert [(one.name, one.running, one.waiting, one.cache_usage) for one in state.ready] == [
        ("a", 4, 9, 0.5),
        ("b", 0, 0, 0.0),
    ]
    assert (state.now, state.num_starting, state.num_held, state.num_arrivals) == (7.0, 1, 2, 0)


def test_the_queue_time_of_a_class_counts(scaling: RayScaling, recorder: Recorder) -> None:
    scaling(context(2, 10.0, running={"a": 1.0, "b": 1.0}, queue_s_critical={"a": 0.75}, queue_s_low={"a": 3.0}))
    (state,) = recorder.states
    assert {priority: age for priority, age in state.ready[0].queue_s.items() if age} == {
        Priority.CRITICAL: 0.75,
        Priority.LOW: 3.0,
    }
    waits = RayScaling("reactive", {"max_replicas": 4})
    assert waits(context(1, 1.0, waiting={"a": 1.0}, queue_s_critical={"a": 0.25}))[0] == 1
    assert waits(context(1, 2.0, waiting={"a": 1.0}, queue_s_critical={"a": 0.75}))[0] > 1


def test_counters_are_told_by_their_growth(scaling: RayScaling, recorder: Recorder) -> None:
    """Also after a start that sets them to zero, and without the growth of a replica that is gone."""
    reports: list[tuple[float, dict[str, float], dict[str, float]]] = [
        (10.0, {"a": 100.0}, {"a": 1000.0}),
        (12.0, {"a": 110.0, "b": 50.0}, {"a": 1400.0, "b": 70.0}),
        (12.0, {"a": 110.0, "b": 50.0}, {"a": 1400.0, "b": 70.0}),  # called again before the next report
        (13.0, {"a": 4.0, "b": 51.0}, {"a": 30.0, "b": 70.0}),
        (14.0, {"b": 53.0}, {"b": 90.0}),
    ]
    for moment, arrivals, tokens in reports:
        scaling(context(1, moment, arrivals=arrivals, tokens=tokens))
    assert [state.num_arrivals for state in recorder.states] == [0, 10, 10, 15, 17]
    rates = [[one.tokens_per_s for one in state.ready] for state in recorder.states]
    assert rates == [[0.0], [200.0, 0.0], [200.0, 0.0], [30.0, 0.0], [20.0]]


def test_no_report_yet(scaling: RayScaling, recorder: Recorder) -> None:
    scaling(SimpleNamespace(running_replicas=[Name("a")], target_num_replicas=1, raw_metrics=None,
                            total_queued_requests=None))  # fmt: skip
    assert recorder.states[0].ready[0].running == 0


def test_a_queue_asks_for_more() -> None:
    scaling = RayScaling("reactive", {"max_replicas": 4, "waiting_per_replica": 2})
    assert scaling(context(1, 1.0, running={"a": 1.0}, waiting={"a": 0.0}))[0] == 1
    assert scaling(context(1, 2.0, running={"a": 1.0}, waiting={"a": 9.0}))[0] > 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_replicas": 1, "replicas": 2}, "max_replicas is 1"),
        ({"scaling": "best"}, "scaling is 'best'"),
        ({"scaling_settings": {"speed": 1}}, "speed"),
        ({"scaling_settings": {"utilisation": 2.0}}, "utilisation is 2"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((ClusterError, ConfigError)) as caught:
        ClusterSettings(model="a/b", **fields).check()
    assert words in str(caught.value)


def test_figures_of_all_models_are_added() -> None:
    page = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{model="a"} 2\nvllm:num_requests_running{model="b"} 3\n'
        'vllm:num_requests_waiting{model="a"} 1\nother 7\nvllm:num_requests_running_other 9\n'
    )
    figures = figures_of(page)
    assert {name: value for name, value in figures.items() if value} == {"running": 5, "waiting": 1}
    assert queue_s(figures) == dict.fromkeys(Priority, 0.0)


def test_an_answer_without_metrics_leaves_the_last_figures() -> None:
    http = MagicMock()
    http.get.return_value.__aenter__.return_value.text = AsyncMock(return_value="<html> not found")
    server = Mock(endpoints=Endpoints(), num_restarts=2)
    readiness = AsyncMock(return_value=READY)
    one: Any = SimpleNamespace(_born=0.0, _figures={"running": 5.0}, _http=http, _server=server, _readiness=readiness)
    figures = asyncio.run(Replica.record_routing_stats(one))
    assert (figures["running"], figures["restarts"], figures["is_ready"]) == (5.0, 2.0, 1.0)


def test_the_oldest_wait_of_a_class_is_of_any_model() -> None:
    page = (
        'tidewheel_wait_oldest_seconds{class="low",model="a"} 1.5\n'
        'tidewheel_wait_oldest_seconds{model="b",class="low"} 4\n'
        'tidewheel_wait_oldest_seconds{model="b",class="critical"} 0.25\n'
        'tidewheel_wait_oldest_seconds_other{class="high"} 9\n'
    )
    waits = {Priority.CRITICAL: 0.25, Priority.HIGH: 0.0, Priority.NORMAL: 0.0, Priority.LOW: 4.0}
    assert queue_s(figures_of(page)) == waits
