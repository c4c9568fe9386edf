"""The time of a load is split by what it reported."""

from __future__ import annotations

from tidewheel.runner.loading import StageClock


def test_every_second_belongs_to_a_stage() -> None:
    times = iter((10.0, 11.0, 13.5, 14.0, 15.0))
    reports = [("weights", 0.0), ("weights", 1.0), ("kernels", 0.5), ("weights", 1.0)]
    seen: list[tuple[str, float]] = []
    clock = StageClock(lambda stage, fraction: seen.append((stage, fraction)), lambda: next(times))
    for report in reports:
        clock(*report)
    assert clock.seconds() == {"start": 1.0, "weights": 3.5, "kernels": 0.5}
    assert seen == reports
