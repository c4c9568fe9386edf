"""Idle share of the device in decode-only steps, by torch.profiler's timeline of kernels.

The tracer slows small kernels, so small models may over-report idle time. Part of the timeline is kept as
`idle_MODEL.json.gz`, for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu.engine_steps import TimedLLM, open_engine, warm_up
from gpu.measurements import Measurement
from gpu.stage import Stage, parser, run
from roofline import SHAPES, decode_seconds
from work_items import of_length

BATCH, PROMPT = 128, 64
SECONDS = 1.0
MAX_STEPS = 600  # every kernel is a traced event
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # of Kineto
SKIPPED_FRACTION = 0.1  # at each end: prefill, and ends of requests
KEPT_US = 100_000.0
MAX_GAPS = 5000


class Interval(NamedTuple):
    begin: float
    end: float


class Timeline(NamedTuple):
    events: list[dict[str, Any]]
    intervals: list[Interval]
    window: Interval


def read_timeline(trace: dict[str, Any]) -> Timeline:
    """Raise RuntimeError if nothing ran on the device."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in ON_DEVICE]
    if not events:
        raise RuntimeError("the profiler saw no kernel")
    events.sort(key=lambda event: float(event["ts"]))
    intervals = [Interval(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events]
    begin, end = intervals[0].begin, max(interval.end for interval in intervals)
    margin = SKIPPED_FRACTION * (end - begin)
    return Timeline(events, intervals, Interval(begin + margin, end - margin))


def gaps(intervals: Iterable[Interval], window: Interval) -> list[float]:
    """Return the uncovered lengths of the window; sorted intervals may overlap."""
    found: list[float] = []
    reached = window.begin
    for begin, end in (*intervals, Interval(window.end, window.end)):
        if min(begin, window.end) > reached:
            found.append(min(begin, window.end) - reached)
        reached = max(reached, end)
    return found


def idle_fraction(intervals: Iterable[Interval], window: Interval) -> float:
    return sum(gaps(intervals, window)) / (window.end - window.begin)


def body(stage: Stage) -> None:
    if not stage.is_cuda:
        stage.skip("idle device", "the timeline of kernels exists on CUDA only")
        return
    # The tracer hooks into the driver, which must come before graphs are captured.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.zeros(1, device=stage.device)
        torch.cuda.synchronize(stage.device)
    with tempfile.TemporaryDirectory() as scratch:
        for model in reversed(stage.models):
            with stage.part(f"idle device, {model}"):
                stage.check_time(12.0)
                with open_engine(stage, model, Path(scratch)) as engine:
                    _profile(stage, model, engine, Path(scratch) / "trace.json")


def _profile(stage: Stage, model: str, engine: TimedLLM, path: Path) -> None:
    vocab = SHAPES[model].vocab
    step_s = 1.3 * decode_seconds(SHAPES[model], BATCH, PROMPT, stage.ceilings)
    num_steps = min(MAX_STEPS, round(SECONDS / step_s))
    warm_up(engine, of_length(8, PROMPT, 16, vocab), 0.0)
    engine.timed(of_length(BATCH, PROMPT, 16, vocab), 0.0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        timed = engine.timed(of_length(BATCH, PROMPT, num_steps, vocab, seed=1), 0.0)
        torch.cuda.synchronize(stage.device)
    profiler.export_chrome_trace(str(path))
    timeline = read_timeline(json.loads(path.read_text()))
    _keep(stage.out / f"idle_{model}.json.gz", timeline)
    steps = [step.seconds for step in timed.decode_steps()]
    window = timeline.window
    measured = Measurement(
        name="idle device",
        case=f"{model}, batch {BATCH}, {num_steps} decode steps",
        value=100.0 * idle_fraction(timeline.intervals, window),
        unit="% of the time",
        samples=[1e-6 * gap for gap in gaps(timeline.intervals, window)][:MAX_GAPS],
        sample_unit="s without a kernel",
        details={
            "model": model,
            "window_s": 1e-6 * (window.end - window.begin),
            "kernels_per_step": len(timeline.events) / num_steps,
            "step_ms_under_the_profiler": 1e3 * sum(steps) / max(len(steps), 1),
            "busiest_kernels": _busiest(timeline.events),
        },
    )
    stage.result(measured)


def _busiest(events: list[dict[str, Any]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for event in events:
        name = str(event["name"])[:80]
        totals[name] = totals.get(name, 0.0) + float(event["dur"])
    whole = sum(totals.values())
    ranked = sorted(totals.items(), key=lambda item: -item[1])[:15]
    return {name: round(total / whole, 4) for name, total in ranked}


def _keep(path: Path, timeline: Timeline) -> None:
    keys, begin = ("ph", "cat", "name", "pid", "tid", "ts", "dur"), timeline.window.begin
    kept = [
        {key: event[key] for key in keys}
        for event in timeline.events
        if begin <= float(event["ts"]) < begin + KEPT_US
    ]
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": kept}, file)


if __name__ == "__main__":
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}  # for CUDA graphs, by torch
    run("idle", body, parser(__doc__).parse_args())
