"""Knees of latency curves: up to one, load is nearly free; beyond it latency rises steeply.

A curve plots mean latency of whole answers over requests per second, offered (open loop) or achieved (in flight).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tidewheel.bench import BenchError
from tidewheel.bench.estimates import knee, mean
from tidewheel.bench.results import StageResult


class Point(NamedTuple):
    load: int  # index into the stage's loads
    rate: float  # requests per second
    latency: float  # mean seconds


def curve(result: StageResult, target: str) -> list[Point]:
    """Return the points whose rate exceeds all earlier ones.

    A load without requests has no point; one without answers has the client's limit as latency. A mean, because one
    of a point's few requests would decide a tail.
    """
    points: list[Point] = []
    for index, load in enumerate(result.stage.loads):
        outcomes = [outcome for repeat in result.outcomes(target, index) for outcome in repeat]
        if not outcomes:
            continue
        rate = load.rate if load.rate is not None else result.figures(target, index)["requests_per_s"].mean
        if math.isnan(rate) or (points and rate <= points[-1].rate):
            continue
        latency = mean([o.latency for o in outcomes if not o.error and o.latency is not None])
        points.append(Point(index, rate, result.stage.timeout_s if math.isnan(latency) else latency))
    return points


def knee_of(result: StageResult, target: str) -> Point:
    """Raise `BenchError` for fewer than 3 points."""
    points = curve(result, target)
    if len(points) < 3:
        raise BenchError(f"too few requests to find the knee of {target}: raise --seconds, or the rates")
    return points[knee([point.rate for point in points], [point.latency for point in points])]
