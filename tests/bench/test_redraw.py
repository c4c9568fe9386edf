"""The pictures of recorded results can be drawn from the records alone."""

from __future__ import annotations

import json
from typing import Any

from matplotlib.axes import Axes

from common import redraw
from common.study import RESULTS
from support.marathon.page import recoveries
from tidewheel.bench.charts import ChartImage


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def drawn(name: str) -> dict[str, ChartImage]:
    return redraw.DRAWN[name](record(name))


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_capacities_that_are_only_bounded_say_so() -> None:
    bars = drawn("cpu_capacity")["cpu_capacity_capacity"].figure.axes[0]
    assert {"under 6.15", "under 0.804", "38.8   25.2x"} <= set(texts(bars))
    assert "0" not in texts(bars)


def test_every_record_has_its_pictures() -> None:
    names = {file for name in redraw.DRAWN for file in drawn(name)}
    assert {path.stem for path in RESULTS.glob("*.webp")} >= names
    capacity = {"cpu_capacity_capacity", "cpu_capacity_capacity_rates"}
    assert names == {*capacity, "host_timeline", "overload", "shared_device_policies"}


def test_the_host_is_waited_for_only_without_a_step_ahead() -> None:
    steps, _ = drawn("host_timeline")["host_timeline"].figure.axes
    waits = [text for text in texts(steps) if text.endswith("%")]
    assert len(waits) == 2
    assert all("async_scheduling off" in label.get_text() for label in steps.get_yticklabels()[::2])


def test_an_overload_says_what_was_answered_of_each_class() -> None:
    answered, first = drawn("overload")["overload"].figure.axes
    assert "200 of 201" in texts(answered)
    assert "252 ms" in texts(first)


def test_recoveries_have_a_row_for_each_kind_of_fault() -> None:
    recovery_s = record("marathon")["recovery_s"]
    (axes,) = recoveries(recovery_s).figure.axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert len(rows) == len(recovery_s)
    assert rows[-1] == "front end paused, 5 times"
