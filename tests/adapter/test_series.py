"""Totals counted here, differences sent to the server."""

from __future__ import annotations

import gc

from support.triton.fake_triton import MetricFamily
from tidewheel.adapter.metrics import Counter, CounterByLabel, Gauge, Histogram, counter_family, gauge_family

LABELS = {"model_name": "demo"}
value = MetricFamily.value


def test_counter_sends_differences() -> None:
    counter = Counter(counter_family("c", "d"), LABELS)
    for total in (3, 3, 5.5):
        counter.advance(total)
    assert value("c") == 5.5
    assert MetricFamily.num_calls == 2  # nothing for what did not change


def test_counter_survives_a_restart_of_what_it_follows() -> None:
    counter = Counter(counter_family("c", "d"), LABELS)
    for total in (7, 2, 3):
        counter.advance(total)
    assert value("c") == 10


def test_counters_of_two_front_ends_add_up() -> None:
    first, second = (Counter(counter_family("c", "d"), LABELS) for _ in range(2))
    first.advance(4)
    second.advance(5)
    first.advance(6)
    assert value("c") == 11


def test_a_follower_goes_on_where_the_publisher_stopped() -> None:
    publisher, follower = (Counter(counter_family("c", "d"), LABELS) for _ in range(2))
    publisher.advance(10)
    follower.follow(10)
    follower.advance(12)
    assert value("c") == 12


def test_gauge_sends_changes() -> None:
    gauge = Gauge(gauge_family("g", "d"), LABELS)
    for number in (0, 0, 2, 2):
        gauge.set(number)
    assert value("g") == 2
    assert MetricFamily.num_calls == 2
    gauge.forget()
    gauge.set(2)
    assert MetricFamily.num_calls == 3


def test_counters_by_label() -> None:
    counters = CounterByLabel(counter_family("c", "d"), LABELS, "tag", ["TW-BUSY"])
    assert value("c", tag="TW-BUSY") == 0
    counters.advance({"TW-INPUT": 2})
    counters.advance({"TW-INPUT": 3, "TW-BUSY": 1})
    assert (value("c", tag="TW-INPUT"), value("c", tag="TW-BUSY")) == (3, 1)


def test_histogram_is_cumulative() -> None:
    histogram = Histogram("h", "d", (0.001, 0.5, 10.0), LABELS)
    histogram.advance([1, 0, 2, 1], 31.5)
    histogram.advance([1, 4, 2, 1], 32.5)
    assert [value("h_bucket", le=edge) for edge in ("0.001", "0.5", "10", "+Inf")] == [1, 5, 7, 8]
    assert value("h_count") == 8
    assert value("h_sum") == 32.5


def test_families_live_as_long_as_their_series() -> None:
    histogram, counters = Histogram("h", "d", (1.0,), LABELS), CounterByLabel(counter_family("c", "d"), LABELS, "tag")
    gc.collect()
    histogram.advance([1, 1], 2.0)
    counters.advance({"a": 1})
    assert value("h_count") == 2
