"""Twice the capacity through Triton on one machine: service by class, and refusals.

    python benchmarks overload build/qwen3-40m --save

One server gets, in this order: more than it can do (its capacity), CRITICAL alone (its unloaded time to first token),
0.5 to 1.5 times the capacity (the peak of goodput), and twice. Goodput counts full answers within the objective.
CRITICAL is a fifth of the capacity, so it can always be served.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from common.offered_load import run
from common.serving import Address, metric, served
from common.study import RESULTS, Study
from tidewheel.bench.charts import COLOURS, GREYS, INK, ChartImage, panels, style
from tidewheel.bench.estimates import quantile
from tidewheel.bench.outcome import RequestOutcome, Slo
from tidewheel.bench.workloads import PLAIN, Workload, WorkloadKind
from tidewheel.record.recorded_events import AddEvent, ScheduleEvent
from tidewheel.simulate.calibration import measured_steps
from tidewheel.simulate.replay import Recording
from tidewheel.workload.arrivals import poisson_until
from tidewheel.workload.lengths import LengthRange

WORKLOAD = Workload("overload", LengthRange(16, 112), LengthRange(8, 56), vocab=10_000)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_waiting_requests": 4,
    "ageing_s": 0.2,
}
CLASSES = {"CRITICAL": 1, "HIGH": 2, "NORMAL": 3, "LOW": 4}
CRITICAL_SHARE = 0.2
OTHERS = {"HIGH": 0.25, "NORMAL": 0.45, "LOW": 0.3}  # of the rest
SWEEP = (0.5, 0.75, 1.0, 1.25, 1.5)


def step_seconds(folder: Path) -> list[float]:
    recordings = (Recording(path) for path in sorted(folder.glob("*.jsonl")))
    return [step.seconds for recording in recordings for step in measured_steps(recording.events())]


class LowWaits(NamedTuple):
    started: int
    longest_s: float  # from arrival to first step
    overtaken_after_ageing: int  # by later requests, not CRITICAL


def low_waits(folder: Path, since: float) -> LowWaits:
    arrived: dict[str, tuple[float, int]] = {}
    started: list[tuple[float, float, int]] = []  # start, arrival, class
    for path in sorted(folder.glob("*.jsonl")):
        for event in Recording(path).events():
            if isinstance(event, AddEvent) and not event.refused:
                arrived |= {r.request_id: (r.arrival_time, r.priority) for r in event.requests}
            elif isinstance(event, ScheduleEvent):
                first = [arrived.pop(name) for name in event.new_requests if name in arrived]
                started += [(event.now, arrival, priority) for arrival, priority in first]
    low = [(start, arrival) for start, arrival, priority in started if priority == 4 and arrival > since]
    overtakers = sum(
        arrival + 2 * SETTINGS["ageing_s"] <= other_start < start and other_arrival > arrival and priority > 1
        for start, arrival in low
        for other_start, other_arrival, priority in started
    )
    return LowWaits(len(low), max((start - arrival for start, arrival in low), default=math.nan), overtakers)


def class_mix(load: float) -> list[WorkloadKind]:
    """Return the classes at `load` times the capacity."""
    critical = CRITICAL_SHARE / load
    rest = {name: share * (1.0 - critical) for name, share in OTHERS.items()}
    return [
        WorkloadKind(share, {"priority": CLASSES[name]}) for name, share in {"CRITICAL": critical, **rest}.items()
    ]


def send(
    address: Address, rate: float, seconds: float, rng: random.Random, kinds: Sequence[WorkloadKind] = PLAIN
) -> list[RequestOutcome]:
    turns = replace(WORKLOAD, kinds=tuple(kinds)).conversations(rng.randrange(1 << 32))
    load = [replace(turn, at=at) for at, (turn,) in zip(poisson_until(seconds, rate, rng), turns, strict=False)]
    return run(address.grpc, address.model, load)


def measure_capacity(address: Address, seconds: float, rng: random.Random) -> float:
    outcomes = send(address, 40.0, seconds, rng)
    return throughput([o for o in outcomes if o.finish_reason == "length"], seconds)


def throughput(outcomes: Sequence[RequestOutcome], seconds: float) -> float:
    """Return requests ended per second of the offered time, without start-up and tail."""
    begin = 0.2 * seconds
    ends = [o.sent + (o.last_token or math.inf) for o in outcomes]
    return sum(begin <= end < seconds for end in ends) / (seconds - begin)


def goodput(outcomes: Sequence[RequestOutcome], seconds: float, slo: Slo) -> float:
    return throughput([o for o in outcomes if slo.is_met(o)], seconds)


def by_class(outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    table = {}
    for name, priority in CLASSES.items():
        mine = [o for o in outcomes if o.offered.parameters.get("priority") == priority]
        ttfts = [o.first_token for o in mine if o.first_token is not None]
        tpots = [o.tpot for o in mine if o.tpot is not None]
        table[name] = {
            "offered": len(mine),
            "finished": sum(o.finish_reason == "length" for o in mine),
            "refused_or_shed": dict(Counter(o.code for o in mine if o.error)),
            "ttft_s": {
                "p50": quantile(ttfts, 0.5),
                "p99": quantile(ttfts, 0.99),
                "max": max(ttfts, default=math.nan),
            },
            "tpot_s": {"p50": quantile(tpots, 0.5), "p99": quantile(tpots, 0.99)},
        }
    return table


def refusals_within(address: Address, bound: str) -> float:
    total = metric(address.metrics, "tidewheel_refusal_seconds_count")
    return metric(address.metrics, "tidewheel_refusal_seconds_bucket", le=bound) / total if total else math.nan


def low_start_bound(capacity: float) -> float:
    """Return seconds until a LOW request starts: two lifts to HIGH, then a full waiting set that CRITICAL slows."""
    return 2 * SETTINGS["ageing_s"] + SETTINGS["max_waiting_requests"] / (capacity * (1.0 - CRITICAL_SHARE))


def is_idle_soon(address: Address) -> bool:
    """Return whether nothing runs or waits and all blocks are back; metrics lag."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if not any(metric(address.metrics, name) for name in names):
            return True
        time.sleep(0.2)
    return False


def measure(address: Address, recording: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    slo = Slo(arguments.ttft, arguments.tpot)
    send(address, 4.0, 1.0, rng)  # warm-up
    capacity = measure_capacity(address, arguments.sweep_seconds, rng)
    print(f"capacity {capacity:.2f} requests/s")
    alone = send(
        address, CRITICAL_SHARE * capacity, max(120.0, arguments.seconds), rng, [WorkloadKind(1.0, {"priority": 1})]
    )
    unloaded = quantile([o.first_token for o in alone if o.first_token is not None], 0.99)
    print(f"CRITICAL alone: {len(alone)} requests, p99 TTFT {unloaded * 1e3:.0f} ms")
    sweep = {}
    for load in SWEEP:
        outcomes = send(address, load * capacity, arguments.sweep_seconds, rng, class_mix(load))
        sweep[str(load)] = goodput(outcomes, arguments.sweep_seconds, slo)
        print(f"load {load:4.2f}: goodput {sweep[str(load)]:.2f} requests/s")
    num_steps, begin = len(step_seconds(recording)), time.monotonic()
    outcomes = send(address, 2.0 * capacity, arguments.seconds, rng, class_mix(2.0))
    steps = step_seconds(recording)[num_steps:]
    table = by_class(outcomes)
    overload = goodput(outcomes, arguments.seconds, slo)
    critical = table["CRITICAL"]["ttft_s"]["p99"]
    step_p99 = quantile(steps, 0.99)
    is_idle = is_idle_soon(address)
    return {
        "slo": asdict(slo),
        "capacity_requests_per_s": capacity,
        "peak_goodput": max(*sweep.values(), overload),
        "goodput_by_load": sweep,
        "overload": {
            "load": 2.0,
            "seconds": arguments.seconds,
            "goodput": overload,
            "goodput_over_peak": overload / max(*sweep.values(), overload),
            "classes": table,
            "step_seconds": {"p50": statistics.median(steps), "p99": step_p99, "steps": len(steps)},
            "low_waits": low_waits(recording, begin)._asdict(),
            "low_wait_at_mean_rate_s": low_start_bound(capacity),
            "refusals_within_50_ms": refusals_within(address, "0.05"),
            "unanswered": sum(not o.finish_reason and not o.error for o in outcomes),
            "idle_afterwards": is_idle,
        },
        "critical": {
            "unloaded_p99_ttft_s": unloaded,
            "overload_p99_ttft_s": critical,
            "bound_s": unloaded + 2 * step_p99,
            "ratio_to_bound": critical / (unloaded + 2 * step_p99),
        },
    }


def picture(result: Mapping[str, Any]) -> ChartImage:
    """Draw a record of this study: per class, the share answered and the p99 time to first token."""
    figure, (answered, first) = panels(2, height=2.6)
    classes = result["overload"]["classes"]
    for row, one in enumerate(classes.values()):
        share, p99 = 100 * one["finished"] / one["offered"], 1e3 * one["ttft_s"]["p99"]
        texts = f"{one['finished']} of {one['offered']}", f"{p99:,.0f} ms"
        for axes, value, text in zip((answered, first), (share, p99), texts, strict=True):
            axes.barh(row, value, 0.6, color=COLOURS[0] if row == 0 else GREYS[1])
            axes.annotate(text, (value, row), (6, 0), textcoords="offset points", va="center")
    alone = 1e3 * result["critical"]["unloaded_p99_ttft_s"]
    first.axvline(alone, color=INK, linewidth=0.9, linestyle=":")
    style(answered, "Answered at twice the capacity", "requests of each class, in two minutes")
    style(first, "Time to first token, p99", f"dotted: {alone:.0f} ms, of CRITICAL requests alone")
    for axes, names in ((answered, list(classes)), (first, [""] * len(classes))):
        axes.set_yticks(range(len(classes)), names)
        axes.invert_yaxis()
        axes.margins(x=0.22)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.grid(axis="y", visible=False)
    return ChartImage("overload", "", figure)


def main() -> None:
    study = Study("overload", __doc__, "torch", "tritonclient")
    study.add_argument("folder", type=Path, help="a model that tidewheel serves")
    study.add_argument("--seconds", type=float, default=120.0, help="of twice the capacity")
    study.add_argument("--sweep-seconds", type=float, default=40.0, help="of every other load")
    study.add_argument("--ttft", type=float, default=1.0, help="objective: time to first token, s")
    study.add_argument("--tpot", type=float, default=0.1, help="objective: time per output token, s")
    study.add_argument("--seed", type=int, default=0)
    options = study.begin()
    with (
        tempfile.TemporaryDirectory() as recording,
        served(options.folder, {**SETTINGS, "record": recording}) as address,
    ):
        result = measure(address, Path(recording), options)
    print(json.dumps(result, indent=1))
    study.save({"settings": SETTINGS, **result})
    if options.save:
        (RESULTS / "overload.webp").write_bytes(picture(result).webp())


if __name__ == "__main__":
    main()
