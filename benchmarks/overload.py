"""Twice the capacity through Triton on one machine: service by class, and refusals.

    python benchmarks/overload.py FOLDER                 a folder of benchmarks/random_model.py
    python benchmarks/overload.py FOLDER --seconds 120 --save

One run on one server measures the capacity (a closed loop keeps it full), CRITICAL alone (its unloaded time to first
token), 0.5 to 1.5 times the capacity (the peak of goodput), and twice. Goodput counts full answers within the
objective: time to first token and per output token. CRITICAL is a fifth of the capacity, so it can always be served.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import record
from offered_load import offer, run
from serving import Address, metric, served
from tidewheel.bench.estimates import quantile
from tidewheel.bench.outcome import Offered, Outcome
from tidewheel.record.recorded_events import Added, Scheduled
from tidewheel.simulate.calibration import measured_steps
from tidewheel.simulate.replay import Recording
from tidewheel.workload.arrival_times import poisson_until

INPUTS, OUTPUTS = (16, 112), (8, 56)  # shortest and longest, in tokens
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
PORTS = 18_700


def step_seconds(folder: Path) -> list[float]:
    recordings = (Recording(path) for path in sorted(folder.glob("*.jsonl")))
    return [step.seconds for recording in recordings for step in measured_steps(recording.events())]


class LowWaits(NamedTuple):
    started: int
    longest_s: float  # from arrival to first step
    overtaken_after_ageing: int  # by later requests, not CRITICAL, that started first once in HIGH


def low_waits(folder: Path, since: float) -> LowWaits:
    arrived: dict[str, tuple[float, int]] = {}
    started: list[tuple[float, float, int]] = []  # start, arrival, class
    for path in sorted(folder.glob("*.jsonl")):
        for event in Recording(path).events():
            if isinstance(event, Added) and not event.refused:
                arrived |= {r.request_id: (r.arrival_time, r.priority) for r in event.requests}
            elif isinstance(event, Scheduled):
                first = [arrived.pop(name) for name in event.new_requests if name in arrived]
                started += [(event.now, arrival, priority) for arrival, priority in first]
    low = [(start, arrival) for start, arrival, priority in started if priority == 4 and arrival > since]
    overtakers = sum(
        arrival + 2 * SETTINGS["ageing_s"] <= other_start < start and other_arrival > arrival and priority > 1
        for start, arrival in low
        for other_start, other_arrival, priority in started
    )
    return LowWaits(len(low), max((start - arrival for start, arrival in low), default=math.nan), overtakers)


def class_mix(load: float) -> list[tuple[float, dict[str, Any]]]:
    """Return the classes' (share, parameters) at `load` times the capacity."""
    critical = CRITICAL_SHARE / load
    rest = {name: share * (1.0 - critical) for name, share in OTHERS.items()}
    return [(share, {"priority": CLASSES[name]}) for name, share in {"CRITICAL": critical, **rest}.items()]


def measure_capacity(address: Address, seconds: float, rng: random.Random) -> float:
    times = poisson_until(seconds, 40.0, rng)
    outcomes = run(address.grpc, address.model, offer(times, [(1.0, {})], INPUTS, OUTPUTS, rng))
    return throughput([o for o in outcomes if o.finish_reason == "length"], seconds)


def throughput(outcomes: Sequence[Outcome], seconds: float) -> float:
    """Return requests ended per second of the offered time, without start-up and tail."""
    begin = 0.2 * seconds
    ends = [o.sent + (o.last_token or math.inf) for o in outcomes]
    return sum(begin <= end < seconds for end in ends) / (seconds - begin)


def goodput(outcomes: Sequence[Outcome], seconds: float, ttft_s: float, tpot_s: float) -> float:
    return throughput([o for o in outcomes if o.is_good(ttft_s, tpot_s)], seconds)


def by_class(outcomes: Sequence[Outcome]) -> dict[str, Any]:
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
    total = metric(address, "tidewheel_refusal_seconds_count")
    return metric(address, "tidewheel_refusal_seconds_bucket", le=bound) / total if total else math.nan


def low_start_bound(capacity: float) -> float:
    """Return seconds until a LOW request that keeps its place starts, at the mean rate of ends.

    Two lifts bring it to HIGH, behind at most a full waiting set, which starts at the rate that CRITICAL leaves.
    """
    return 2 * SETTINGS["ageing_s"] + SETTINGS["max_waiting_requests"] / (capacity * (1.0 - CRITICAL_SHARE))


def is_idle_soon(address: Address) -> bool:
    """Return whether nothing runs or waits and all blocks are back; metrics lag about a second."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if not any(metric(address, name) for name in names):
            return True
        time.sleep(0.2)
    return False


def at_load(address: Address, capacity: float, load: float, seconds: float, rng: random.Random) -> list[Outcome]:
    times = poisson_until(seconds, load * capacity, rng)
    return run(address.grpc, address.model, offer(times, class_mix(load), INPUTS, OUTPUTS, rng))


def critical_alone(address: Address, capacity: float, seconds: float, rng: random.Random) -> list[Outcome]:
    times = poisson_until(seconds, CRITICAL_SHARE * capacity, rng)
    work: list[Offered] = offer(times, [(1.0, {"priority": 1})], INPUTS, OUTPUTS, rng)
    return run(address.grpc, address.model, work)


def measure(address: Address, recording: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    ttft_s, tpot_s = arguments.ttft, arguments.tpot
    run(address.grpc, address.model, offer([0.0, 0.1, 0.2], [(1.0, {})], INPUTS, OUTPUTS, rng))
    capacity = measure_capacity(address, arguments.sweep_seconds, rng)
    print(f"capacity {capacity:.2f} requests/s")
    alone = critical_alone(address, capacity, max(120.0, arguments.seconds), rng)
    unloaded = quantile([o.first_token for o in alone if o.first_token is not None], 0.99)
    print(f"CRITICAL alone: {len(alone)} requests, p99 TTFT {unloaded * 1e3:.0f} ms")
    sweep = {}
    for load in SWEEP:
        outcomes = at_load(address, capacity, load, arguments.sweep_seconds, rng)
        sweep[str(load)] = goodput(outcomes, arguments.sweep_seconds, ttft_s, tpot_s)
        print(f"load {load:4.2f}: goodput {sweep[str(load)]:.2f} requests/s")
    num_steps, begin = len(step_seconds(recording)), time.monotonic()
    outcomes = at_load(address, capacity, 2.0, arguments.seconds, rng)
    steps = step_seconds(recording)[num_steps:]
    table = by_class(outcomes)
    overload = goodput(outcomes, arguments.seconds, ttft_s, tpot_s)
    critical = table["CRITICAL"]["ttft_s"]["p99"]
    step_p99 = quantile(steps, 0.99)
    is_idle = is_idle_soon(address)
    return {
        "slo": {"ttft_s": ttft_s, "tpot_s": tpot_s},
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a model that tidewheel serves")
    parser.add_argument("--seconds", type=float, default=120.0, help="of twice the capacity")
    parser.add_argument("--sweep-seconds", type=float, default=40.0, help="of every other load")
    parser.add_argument("--ttft", type=float, default=1.0, help="objective: time to first token, s")
    parser.add_argument("--tpot", type=float, default=0.1, help="objective: time per output token, s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/overload.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder)
        with served(arguments.folder, {**SETTINGS, "record": str(recording)}, ports=PORTS) as address:
            result = measure(address, recording, arguments)
    result = {**record.environment("torch", "tritonclient"), "settings": SETTINGS, **result}
    print_summary(result)
    if arguments.save:
        print(record.save("overload", result))


def print_summary(result: dict[str, Any]) -> None:
    overload, critical = result["overload"], result["critical"]
    print(
        f"goodput at twice the capacity: {overload['goodput']:.2f}/s, {overload['goodput_over_peak']:.1%} of the peak"
    )
    print(
        f"CRITICAL p99 TTFT {critical['overload_p99_ttft_s'] * 1e3:.0f} ms, bound {critical['bound_s'] * 1e3:.0f} ms "
        f"(ratio {critical['ratio_to_bound']:.2f})"
    )
    print(
        f"LOW: longest wait {overload['low_waits']['longest_s'] * 1e3:.0f} ms "
        f"({overload['low_wait_at_mean_rate_s'] * 1e3:.0f} ms at the mean rate), overtaken after ageing "
        f"{overload['low_waits']['overtaken_after_ageing']} times; idle afterwards: {overload['idle_afterwards']}"
    )
    print(f"refusals within 50 ms: {overload['refusals_within_50_ms']:.1%}; unanswered: {overload['unanswered']}")
    for name, row in overload["classes"].items():
        print(
            f"  {name:8} offered {row['offered']:5} finished {row['finished']:5} "
            f"TTFT p50 {row['ttft_s']['p50'] * 1e3:6.0f} p99 {row['ttft_s']['p99'] * 1e3:6.0f} "
            f"max {row['ttft_s']['max'] * 1e3:6.0f} ms  {row['refused_or_shed']}"
        )


if __name__ == "__main__":
    main()
