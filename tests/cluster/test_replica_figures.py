"""Figures of a replica, from a page of its server's metrics."""

from __future__ import annotations

from tidewheel.cluster.replica_figures import figures_of, queue_s
from tidewheel.request import Priority


def test_figures_of_all_models_are_added() -> None:
    page = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{model="a"} 2\nvllm:num_requests_running{model="b"} 3\n'
        'vllm:num_requests_waiting{model="a"} 1\nother 7\nvllm:num_requests_running_other 9\n'
    )
    figures = figures_of(page)
    assert {name: value for name, value in figures.items() if value} == {"running": 5, "waiting": 1}
    assert queue_s(figures) == dict.fromkeys(Priority, 0.0)


def test_the_oldest_wait_of_a_class_is_of_any_model() -> None:
    page = (
        'tidewheel_wait_oldest_seconds{class="low",model="a"} 1.5\n'
        'tidewheel_wait_oldest_seconds{model="b",class="low"} 4\n'
        'tidewheel_wait_oldest_seconds{model="b",class="critical"} 0.25\n'
        'tidewheel_wait_oldest_seconds_other{class="high"} 9\n'
    )
    waits = {Priority.CRITICAL: 0.25, Priority.HIGH: 0.0, Priority.NORMAL: 0.0, Priority.LOW: 4.0}
    assert queue_s(figures_of(page)) == waits
