"""Rate and latencies of concurrent requests, in-process or behind tritonserver."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gpu.stage import Stage
from gpu.values import duration, throughput

IN_PROCESS, THROUGH_TRITON = "in-process", "through Triton"
NUM_KEPT = 2000


def report_streams(
    stage: Stage,
    model: str,
    who: str,
    num_tokens: int,
    seconds: float,
    gaps: Sequence[float],
    first_tokens: Sequence[float],
) -> None:
    """Report rate, times between tokens (ITL) and to first tokens, in seconds."""
    case, details = f"{model}, 256 concurrent", {"model": model, "num_tokens": num_tokens}
    rate = throughput(
        "streamed tokens", case, [seconds], num_tokens, "output tokens/s", None, who=who, details=details
    )
    stage.result(rate)
    stage.result(duration("inter-token latency p50", case, thinned(gaps), None, who=who, details=details))
    p99 = statistics.quantiles(gaps, n=100)[98]
    stage.result(duration("inter-token latency p99", case, [p99], None, who=who, details=details))
    first = list(first_tokens)
    stage.result(duration("time to first token", f"{case}, all at once", first, None, who=who, details=details))


def thinned(values: Sequence[float], count: int = NUM_KEPT) -> list[float]:
    """Return evenly spaced order statistics, which keep the median."""
    ordered = sorted(values)
    if len(ordered) <= count:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]
