"""Measurements of several stages, in which a later one depends on what an earlier one found."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tidewheel.bench.arrivals import Load, ramp
from tidewheel.bench.errors import BenchError
from tidewheel.bench.experiment import Experiment
from tidewheel.bench.plan import Stage
from tidewheel.bench.results import Recorder, StageResult
from tidewheel.bench.stats import Estimate, knee, quantile, ratio_interval
from tidewheel.bench.summary import rates
from tidewheel.bench.targets import Target
from tidewheel.bench.values import Outcome

CAPACITY_USERS = 64
RAMP = (0.2, 1.2, 6)  # of the capacity: from, to, steps
LOADS = {"half the knee": 0.5, "the knee": 1.0, "twice the knee": 2.0}
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
RATES = (10, 100, 500)  # requests/s; 100 stands for what the machine can just do
RATE_OF_CAPACITY = 100
OFFLINE_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Suite:
    """`base` is a stage whose workload, times and objective all others take over."""

    experiment: Experiment
    recorder: Recorder
    base: Stage

    def run(self) -> None:
        """The targets at the loads that were asked for."""
        result = self.experiment.measure(self.base)
        self._note_knees(result)

    def compare(self, reference: Target, ours: str) -> None:
        """All targets at three loads around the knee of the reference's curve.

        The knee is that of its p99 latency over the load, up to 1.2 times its capacity.
        """
        alone = replace(self.base, targets=(reference,), repeats=1)
        capacity = self.capacity(reference)
        rates = [round(rate * capacity, 3) for rate in ramp(*RAMP)]
        loads = tuple(Load("poisson", rate) for rate in rates)
        curve = self.experiment.measure(
            replace(alone, name="curve", title=f"The curve of {reference.name}", loads=loads)
        )
        at = loads[knee_index(curve, reference.name)].value
        loads = tuple(Load("poisson", round(at * share, 3)) for share in LOADS.values())
        self.recorder.extra |= {
            "reference": reference.name,
            "reference_capacity_per_s": capacity,
            "knee_per_s": at,
            "loads": dict(zip(LOADS, (load.value for load in loads), strict=True)),
        }
        title = "Every strategy, the baseline and the peers, at three loads"
        result = self.experiment.measure(replace(self.base, name="compare", title=title, loads=loads))
        by_load = {name: comparison(result, index, ours, reference.name) for index, name in enumerate(LOADS)}
        self.recorder.extra |= {"comparisons": by_load, **by_load["the knee"]}

    def batch_sizes(self) -> None:
        """Throughput, latency and utilisation over the number of requests in flight."""
        loads = tuple(Load("closed", size) for size in BATCH_SIZES)
        self.experiment.measure(
            replace(self.base, name="batch", title="Throughput and latency over the batch size", loads=loads)
        )

    def rates(self, measure: Target) -> None:
        """10, 100 and 500 requests/s, scaled so that 100 is the capacity of `measure` on this machine."""
        capacity = self.capacity(measure)
        scale = capacity / RATE_OF_CAPACITY
        loads = tuple(Load("poisson", round(rate * scale, 3)) for rate in RATES)
        self.recorder.extra |= {
            "capacity_per_s": capacity,
            "rates": {f"{rate}/s": load.value for rate, load in zip(RATES, loads, strict=True)},
        }
        title = "A tenth of the capacity, all of it, and five times as much"
        self.experiment.measure(replace(self.base, name="rates", title=title, loads=loads))

    def offline(self, ours: str) -> None:
        """Everything at once: output tokens per second of each engine, and ours over theirs."""
        count = self.base.max_requests or OFFLINE_REQUESTS
        stage = replace(
            self.base, name="offline", title=f"{count} requests at once", loads=(Load("all"),), max_requests=count
        )
        result = self.experiment.measure(stage)
        self.recorder.extra |= offline_ratios(result, ours)

    def capacity(self, target: Target) -> float:
        """Requests per second of a target that always has work."""
        stage = replace(
            self.base,
            name=f"capacity of {target.name}",
            title=f"Capacity of {target.name}",
            targets=(target,),
            loads=(Load("closed", CAPACITY_USERS),),
            repeats=1,
        )
        result = self.experiment.measure(stage)
        rate = result.figures(target.name, 0).get("requests_per_s", Estimate(0.0, 0.0, 0.0)).mean
        if not rate > 0:
            raise BenchError(f"target {target.name} answered no request in full: there is no load to scale to")
        return float(rate)

    def _note_knees(self, result: StageResult) -> None:
        rates = [load.rate for load in result.stage.loads if load.rate is not None]
        if len(rates) < 3 or len(rates) != len(result.stage.loads):
            return
        for target in result.stage.targets:
            with contextlib.suppress(BenchError):  # the figures are there, without a knee
                knees = self.recorder.extra.setdefault("knees_per_s", {})
                knees[target.name] = rates[knee_index(result, target.name)]


def knee_index(result: StageResult, target: str) -> int:
    """Of the load at the knee of a target's curve of p99 latency. Raises `BenchError` with less than 3 points.

    Loads so low that no request fell into the run have no point; where none was answered, it is the client's limit.
    """
    measured = [
        (index, figures) for index in range(len(result.stage.loads)) if (figures := result.figures(target, index))
    ]
    if len(measured) < 3:
        raise BenchError(f"too few requests to find the knee of {target}: raise --seconds, or the rates")
    latencies = [figures["e2e_s"]["p99"].mean for _, figures in measured]
    limit = result.stage.timeout_s
    at = knee(
        [result.stage.loads[index].rate or 0.0 for index, _ in measured],
        [limit if math.isnan(latency) else latency for latency in latencies],
    )
    return measured[at][0]


def comparison(result: StageResult, load: int, ours: str, reference: str) -> dict[str, Any]:
    """Ours over the reference at one load. Only with both measured."""
    mine, theirs = result.outcomes(ours, load), result.outcomes(reference, load)
    if not mine or not theirs:
        return {}
    slo = result.stage.slo
    seconds = result.stage.seconds

    def goodput(repeats: Sequence[Sequence[Outcome]], *, at_end: bool) -> list[float]:
        is_met = slo.is_met_at_end if at_end else slo.is_met
        return [sum(map(is_met, outcomes)) / seconds for outcomes in repeats]

    def p99_ttft(repeats: Sequence[Sequence[Outcome]]) -> list[float]:
        return [quantile([o.first_token for o in one if o.first_token is not None], 0.99) for one in repeats]

    findings: dict[str, Any] = {"comparison_load": str(result.stage.loads[load])}
    for name, at_end in (("goodput_ratio", False), ("goodput_ratio_e2e", True)):
        findings |= _ratio(name, goodput(mine, at_end=at_end), goodput(theirs, at_end=at_end), 1 / seconds)
    return findings | _ratio("p99_ttft_ratio", p99_ttft(mine), p99_ttft(theirs), math.inf)


def _ratio(name: str, mine: list[float], theirs: list[float], least: float) -> dict[str, Any]:
    """The ratio of paired repeats. A reference that had nothing at all is taken as `least`: the ratio is a bound."""
    is_bound = not any(value > 0 for value in theirs)
    if is_bound and not math.isfinite(least):
        return {name: None, f"{name}_reason": "the reference has no value"}
    pairs = list(zip(mine, [least] * len(theirs) if is_bound else theirs, strict=False))
    ratio = ratio_interval([a for a, _ in pairs], [b for _, b in pairs])
    return {name: ratio.mean, f"{name}_interval": [ratio.low, ratio.high], f"{name}_is_lower_bound": is_bound}


def offline_ratios(result: StageResult, ours: str) -> dict[str, Any]:
    """Ours over each other target in output tokens per second, by paired repeats."""

    def speeds(target: str) -> list[float]:
        return [
            rates(outcomes, result.stage.slo, None)["output_tokens_per_s"] for outcomes in result.outcomes(target, 0)
        ]

    mine = speeds(ours)
    findings: dict[str, Any] = {"offline_ratios": {}}
    for target in result.stage.targets:
        theirs = speeds(target.name)
        if target.name == ours or not theirs or not mine:
            continue
        count = min(len(mine), len(theirs))
        ratio = ratio_interval(mine[:count], theirs[:count])
        findings["offline_ratios"][target.name] = list(ratio)
        if target.kind == "vllm":
            findings |= {"vllm_cpu_ratio": ratio.mean, "vllm_cpu_ratio_interval": [ratio.low, ratio.high]}
    return findings
