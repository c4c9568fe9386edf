"""Where a step's time goes: device time by kernel, and idle time, in decode steps and in steps with prompts.

The tracer slows small kernels, so small models may over-report idle time. Part of each timeline is kept in
`timelines.json.gz`, for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from common.work_items import WorkItem, mixed_lengths, of_length
from gpu.engine_steps import TimedLLM, open_engine, warm_up
from gpu.measurements import Measurement
from gpu.stage import Stage, parser, run
from gpu.suite import TIMELINES
from modelled.roofline import SHAPES
from tidewheel.batch import StepOutputs

BATCHES = {"qwen3-0.6b": 256, "llama-3.1-8b": 128, "tiny": 4}  # rows, as of the goals
CONTEXT = 512
NUM_STEPS = 24  # traced
MOST_OUTPUT = 128  # tokens of a steady load's requests
NEEDS_S = 15.0
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # of Kineto
ON_HOST = ("cpu_op",)  # a dry run's
SKIPPED_FRACTION = 0.1  # of the window, at each end
KEPT_US = 30_000.0
MAX_GAPS = 5000
MOST_NAMED = 15


class Interval(NamedTuple):
    begin: float
    end: float


class Timeline(NamedTuple):
    events: list[dict[str, Any]]
    intervals: list[Interval]
    window: Interval


class ProfiledLLM(TimedLLM):
    """Engine that traces `NUM_STEPS` deliveries once every row has tokens."""

    settled_after = 0  # requests with a first token before the trace begins; 0: none
    profiler: torch.profiler.profile | None = None

    def _deliver(self, outputs: StepOutputs) -> None:
        super()._deliver(outputs)
        if not self.settled_after:
            return
        if self.profiler is None:
            if len({request_id for delivery in self.deliveries for request_id in delivery.request_ids}) >= (
                self.settled_after
            ):
                self._begin()
        elif len(self.deliveries) - self.begun_at == NUM_STEPS:
            self._end()

    def _begin(self) -> None:
        activity = ProfilerActivity.CUDA if self.config.device == "cuda" else ProfilerActivity.CPU
        self.begun_at = len(self.deliveries)
        self.profiler = torch.profiler.profile(activities=[activity])
        self.profiler.start()

    def _end(self) -> None:
        if self.config.device == "cuda":
            torch.cuda.synchronize()
        assert self.profiler is not None
        self.profiler.stop()
        self.settled_after = 0

    def traced(self, work: Sequence[WorkItem], settled_after: int, path: Path) -> Timeline:
        """Generate, and return the timeline of the traced steps."""
        self.settled_after, self.profiler = settled_after, None
        self.timed(work, 0.0)
        if self.profiler is not None and self.settled_after:
            self._end()
            self.profiler = None
        if self.profiler is None:
            raise RuntimeError(f"the work ended within fewer than {NUM_STEPS} steps after its first tokens")
        self.profiler.export_chrome_trace(str(path))
        return read_timeline(json.loads(path.read_text()), ON_DEVICE if self.config.device == "cuda" else ON_HOST)


def read_timeline(trace: dict[str, Any], categories: Sequence[str] = ON_DEVICE) -> Timeline:
    """Raise RuntimeError if nothing ran."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in categories]
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
    if stage.is_cuda:  # The tracer hooks into the driver, which must come before graphs are captured.
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]):
            torch.zeros(1, device=stage.device)
            torch.cuda.synchronize(stage.device)
    kept: dict[str, Any] = {"traceEvents": []}
    with tempfile.TemporaryDirectory() as scratch:
        for model in stage.models:
            with stage.part(f"profile, {model}"):
                stage.check_time(NEEDS_S)
                with open_engine(
                    stage, model, Path(scratch), kind=ProfiledLLM, max_num_seqs=BATCHES[model]
                ) as engine:
                    _profile(stage, model, engine, Path(scratch) / "trace.json", kept["traceEvents"])
    if kept["traceEvents"]:
        with gzip.open(stage.out / TIMELINES, "wt") as file:
            json.dump(kept, file)


def _profile(stage: Stage, model: str, engine: ProfiledLLM, path: Path, kept: list[dict[str, Any]]) -> None:
    vocab = SHAPES[model].vocab
    warm_up(engine, of_length(8, 64, 16, vocab), 0.0)
    batch, context, num_output = BATCHES[model], 16 if stage.is_dry else CONTEXT, 32 if stage.is_dry else MOST_OUTPUT
    decodes = of_length(batch, context, 2 * NUM_STEPS, vocab)
    # Requests end one by one, and others with prompts take their rows.
    steady = mixed_lengths(max(2 * batch, 32), (context, context), (1, num_output), vocab=vocab)
    loads = {
        f"{model}, batch {batch}, context {context}": (decodes, batch),
        f"{model}, {batch} running, with prompts": (steady, batch + batch // 8 + 1),
    }
    for number, (case, (work, settled_after)) in enumerate(loads.items()):
        with stage.part(f"profile, {case}"):
            timeline = engine.traced(work, settled_after, path)
            kept += part_of(timeline, f"{number}: {case}")
            report(stage, model, case, timeline)


def report(stage: Stage, model: str, case: str, timeline: Timeline) -> None:
    """Report a step's time, its idle share, and the time of its kernels."""
    window = timeline.window
    whole_us = timeline.intervals[-1].end - timeline.intervals[0].begin
    details = {
        "model": model,
        "window_s": 1e-6 * (window.end - window.begin),
        "kernels_per_step": len(timeline.events) / NUM_STEPS,
        "step_ms_under_the_profiler": 1e-3 * whole_us / NUM_STEPS,
        "us_by_kernel_per_step": busiest(timeline.events),
    }
    idle = Measurement(
        name="idle device",
        case=case,
        value=100.0 * idle_fraction(timeline.intervals, window),
        unit="% of the time",
        samples=[1e-6 * gap for gap in gaps(timeline.intervals, window)][:MAX_GAPS],
        sample_unit="s without a kernel",
        details=details,
    )
    stage.result(idle)
    for name, microseconds in details["us_by_kernel_per_step"].items():  # type: ignore[attr-defined]
        print(f"    {microseconds:9.1f} us  {name}", flush=True)


def busiest(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return microseconds a step of the kernels that take most."""
    totals: dict[str, float] = {}
    for event in events:
        name = str(event["name"])[:80]
        totals[name] = totals.get(name, 0.0) + float(event["dur"])
    ranked = sorted(totals.items(), key=lambda item: -item[1])[:MOST_NAMED]
    return {name: round(total / NUM_STEPS, 2) for name, total in ranked}


def part_of(timeline: Timeline, label: str) -> list[dict[str, Any]]:
    """Return the first events of the window, as of a process with this label."""
    keys, begin = ("ph", "cat", "name", "tid", "ts", "dur"), timeline.window.begin
    chosen = [event for event in timeline.events if begin <= float(event["ts"]) < begin + KEPT_US]
    return [{**{key: event[key] for key in keys}, "pid": label} for event in chosen]


if __name__ == "__main__":
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}  # for CUDA graphs, by torch
    run("profile", body, parser(__doc__).parse_args())
