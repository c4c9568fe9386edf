"""Totals counted here, differences sent to the server."""

from __future__ import annotations

import gc

import pytest

from support.triton.fake_triton import MetricFamily
from tidewheel.adapter.metrics import MAX_OBSERVATIONS, MAX_WAITING, HistogramSeries, NumberSeries
from tidewheel.metrics import Metric
from tidewheel.stats import Histogram

LABELS = {"model_name": "demo"}
COUNTER = Metric("engine", "counter", "c", "d")
LABELLED = Metric("engine", "counter", "t", "d", label="tag")
GAUGE = Metric("engine", "gauge", "g", "d")
HISTOGRAM = Metric("engine", "histogram", "h", "d")
value = MetricFamily.value


def counter() -> NumberSeries:
    return NumberSeries(COUNTER, LABELS)


def test_counter_sends_differences() -> None:
    series = counter()
    for total in (3, 3, 5.5):
        series.advance({"": total})
    assert value("c") == 5.5
    assert MetricFamily.num_calls == 2  # nothing for what did not change


def test_counter_survives_a_restart_of_what_it_follows() -> None:
    series = counter()
    for total in (7, 2, 3):
        series.advance({"": total})
    assert value("c") == 10


def test_counters_of_two_front_ends_add_up() -> None:
    first, second = counter(), counter()
    first.advance({"": 4})
    second.advance({"": 5})
    first.advance({"": 6})
    assert value("c") == 11


def test_a_follower_goes_on_where_the_publisher_stopped() -> None:
    publisher, follower = counter(), counter()
    publisher.advance({"": 10})
    follower.advance({"": 10}, is_ours=False)
    follower.advance({"": 12})
    assert value("c") == 12


def test_gauge_sends_changes() -> None:
    gauge = NumberSeries(GAUGE, LABELS)
    for number in (0, 0, 2, 2):
        gauge.advance({"": number})
    assert value("g") == 2
    assert MetricFamily.num_calls == 2
    gauge.advance({"": 0}, is_ours=False)
    gauge.advance({"": 2})
    assert MetricFamily.num_calls == 3


def test_counters_by_label() -> None:
    counters = NumberSeries(LABELLED, LABELS, ["TW-BUSY"])
    assert value("t", tag="TW-BUSY") == 0
    counters.advance({"TW-INPUT": 2})
    counters.advance({"TW-INPUT": 3, "TW-BUSY": 1})
    assert (value("t", tag="TW-INPUT"), value("t", tag="TW-BUSY")) == (3, 1)


def observed(bounds: tuple[float, ...], *values: float) -> Histogram:
    histogram = Histogram(bounds)
    for one in values:
        histogram.observe(one)
    return histogram


def counts(series: HistogramSeries, *edges: str) -> list[float]:
    return [value("h_bucket", le=edge) for edge in edges]


def test_a_histogram_sends_what_is_new() -> None:
    bounds = (0.001, 0.5, 10.0)
    series = HistogramSeries(HISTOGRAM, bounds, LABELS)
    total = observed(bounds, 0.001, 5.0, 7.0, 31.5)
    series.advance(total)
    for one in (0.25, 0.25, 0.5, 0.125):
        total.observe(one)
    series.advance(total)
    calls = MetricFamily.num_calls
    series.advance(total)
    assert counts(series, "0.001", "0.5", "10", "+Inf") == [1, 5, 7, 8]
    assert value("h_count") == 8
    assert value("h_sum") == pytest.approx(44.626)
    assert MetricFamily.num_calls == calls == 8


def test_values_on_a_bound_stay_in_their_bucket() -> None:
    """The mean of 0.1, summed up and taken apart again, may lie above 0.1."""
    bounds = (0.1, 0.3)
    series, total = HistogramSeries(HISTOGRAM, bounds, LABELS), Histogram(bounds)
    for count in range(1, 40):
        total.observe(0.1, count)
        total.observe(0.3, count)
        series.advance(total)
    while series.advance(total, has_time=True):  # what waits
        pass
    assert counts(series, "0.1", "0.3", "+Inf") == [780, 1560, 1560]


def test_a_burst_comes_whole_over_several_flushes() -> None:
    bounds = (1.0, 2.0)
    series, total = HistogramSeries(HISTOGRAM, bounds, LABELS), Histogram(bounds)
    for one, count in ((0.25, 400), (1.5, 600), (4.0, 24)):
        total.observe(one, count)
    assert sum(total.counts) == MAX_WAITING
    for _ in range(MAX_WAITING // MAX_OBSERVATIONS + len(bounds)):
        before = MetricFamily.num_calls
        series.advance(total)
        assert MetricFamily.num_calls - before <= MAX_OBSERVATIONS
    assert counts(series, "1", "2", "+Inf") == [400, 1000, 1024]
    assert value("h_sum") == pytest.approx(100 + 900 + 96)


def test_no_value_is_left_to_rounding() -> None:
    """The shares of 1793 values that wait and rest, summed up again, are less than the last value."""
    series = HistogramSeries(HISTOGRAM, (1.0,), LABELS)
    total = observed((1.0,), *[0.5] * 1793)
    while series.advance(total, has_time=True):
        pass
    assert value("h_count") == 1793


def test_a_large_number_of_values_is_thinned_by_bucket() -> None:
    bounds = (1.0, 2.0)
    series, total = HistogramSeries(HISTOGRAM, bounds, LABELS), Histogram(bounds)
    for _ in range(500):
        for one, count in ((0.5, 999), (1.5, 990), (4.0, 11)):  # the last is less than one value a time
            total.observe(one, count)
        before = MetricFamily.num_calls
        series.advance(total)
        assert MetricFamily.num_calls - before <= MAX_OBSERVATIONS
    expected = [0.4995, 0.9945, 1.0]
    assert [count / value("h_count") for count in counts(series, "1", "2", "+Inf")] == pytest.approx(
        expected, abs=2e-3
    )
    assert 0.9 * 500 * MAX_OBSERVATIONS < value("h_count") <= 500 * MAX_OBSERVATIONS
    assert value("h_sum") / value("h_count") == pytest.approx(1.0145, abs=5e-3)


def test_a_histogram_survives_a_restart_of_what_it_follows() -> None:
    series = HistogramSeries(HISTOGRAM, (1.0,), LABELS)
    for total in (observed((1.0,), 1, 1, 5), observed((1.0,), 1, 5)):
        series.advance(total)
    assert (value("h_count"), value("h_sum")) == (5, 13)


def test_a_restart_is_seen_by_other_buckets_too() -> None:
    series = HistogramSeries(HISTOGRAM, (1.0,), LABELS)
    for total in (observed((1.0,), 1, 1), observed((1.0,), 5, 5)):
        series.advance(total)
    assert (value("h_count"), value("h_sum")) == (4, 12)


def test_a_restart_without_a_value_yet() -> None:
    series = HistogramSeries(HISTOGRAM, (1.0,), LABELS)
    for total in (observed((1.0,), 1, 1), observed((1.0,)), observed((1.0,), 5)):
        series.advance(total)
    assert (value("h_count"), value("h_sum")) == (3, 7)


def test_a_histogram_goes_on_where_another_front_end_stopped() -> None:
    series = HistogramSeries(HISTOGRAM, (1.0,), LABELS)
    series.advance(observed((1.0,), 1, 5), is_ours=False)
    series.advance(observed((1.0,), 1, 5, 7))
    assert (value("h_count"), value("h_sum")) == (1, 7)


def test_families_live_as_long_as_their_series() -> None:
    histogram, counters = (
        HistogramSeries(HISTOGRAM, (1.0,), LABELS),
        NumberSeries(LABELLED, LABELS),
    )
    gc.collect()
    histogram.advance(observed((1.0,), 1, 2))
    counters.advance({"a": 1})
    assert value("h_count") == 2
