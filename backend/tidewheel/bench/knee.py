"""Where the curve of a target bends: up to its knee load is nearly free, beyond it latency pays for all that comes.

Curves are of a ramp: requests per second, and the mean latency of whole answers at them. The rate is what an open
loop offered, or what came of a number of requests in flight.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tidewheel.bench.errors import BenchError
from tidewheel.bench.results import StageResult
from tidewheel.bench.stats import knee, mean


class Point(NamedTuple):
    load: int  # index of the stage's loads
    rate: float  # requests per second
    latency: float  # seconds, mean


def curve(result: StageResult, target: str) -> list[Point]:
    """Points at which more was sent than at the ones before.

    A load so low that no request fell into its run has no point; where none was answered, its latency is the client's
    limit. The mean and not a tail: few requests make a point, and one of them would decide.
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
    """Raises `BenchError` with less than 3 points."""
    points = curve(result, target)
    if len(points) < 3:
        raise BenchError(f"too few requests to find the knee of {target}: raise --seconds, or the rates")
    return points[knee([point.rate for point in points], [point.latency for point in points])]
