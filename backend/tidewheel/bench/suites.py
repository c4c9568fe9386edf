"""Suites of stages, later ones set by earlier results."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from tidewheel.bench import BenchError
from tidewheel.bench.arrivals import Load
from tidewheel.bench.estimates import Estimate, quantile
from tidewheel.bench.experiment import Experiment
from tidewheel.bench.findings import (
    comparison,
    efficiency_ratios,
    lone_tpot,
    offline_ratios,
    offline_speeds,
)
from tidewheel.bench.knee import curve as points_of
from tidewheel.bench.knee import knee_of
from tidewheel.bench.outcome import Slo
from tidewheel.bench.results import Recorder, StageResult
from tidewheel.bench.stage import Stage
from tidewheel.bench.targets import Target
from tidewheel.bench.workloads import WORKLOADS
from tidewheel.workload.lengths import Lengths, Range

CAPACITY_USERS = 64
RAMP = (1, 2, 4, 8, 16, 32, 64)  # in flight
ALONE_REQUESTS = 32
# Multiples of a lone request. Ten times its wait, at some 20 ms, still feels prompt; five times its pace still
# streams.
TTFT_MULTIPLE, TPOT_MULTIPLE = 10.0, 5.0
LOADS = {"half the knee": 0.5, "the knee": 1.0, "twice the knee": 2.0}
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
RATES = (10, 100, 500)  # requests/s; 100 stands for capacity
RATE_OF_CAPACITY = 100
OFFLINE_REQUESTS = 64
# Mean lengths agree in the first two, and in the last two.
EFFICIENCY = {
    "mixed lengths": WORKLOADS["mixed"],
    "equal lengths": replace(
        WORKLOADS["fixed"], inputs=Lengths("constant", 72, 1.0, 72), outputs=Lengths("constant", 72, 1.0, 72)
    ),
    "a shared prompt": WORKLOADS["shared-prefix"],
    "prompts of their own": replace(WORKLOADS["mixed"], inputs=Range(272, 384)),
}


@dataclass(frozen=True, slots=True)
class Suite:
    """Suites; stages inherit workload, times and objective from `base`."""

    experiment: Experiment
    recorder: Recorder
    base: Stage

    def run(self) -> None:
        result = self.experiment.measure(self.base)
        self._note_knees(result)

    def compare(self, reference: Target, ours: str, slo: Slo | None = None) -> None:
        """Measure all targets at three loads around the knee of the reference.

        The objective is `slo`, or multiples of what the reference takes for a lone request.
        """
        curve = self.experiment.measure(
            replace(
                self.base,
                name="curve",
                title=f"The curve of {reference.name}",
                targets=(reference,),
                loads=tuple(Load("closed", users) for users in RAMP),
                repeats=1,
            )
        )
        lone = self._alone(reference)
        tpot = lone_tpot(curve.outcomes(reference.name, 0), lone)
        at = knee_of(curve, reference.name)
        base = replace(self.base, slo=slo or Slo(_rounded(TTFT_MULTIPLE * lone), _rounded(TPOT_MULTIPLE * tpot)))
        loads = tuple(Load("poisson", _rounded(at.rate * share)) for share in LOADS.values())
        self.recorder.extra |= {
            "reference": reference.name,
            "unloaded": {"ttft_s": lone, "tpot_s": tpot},
            "objective": {"ttft_s": base.slo.ttft_s, "tpot_s": base.slo.tpot_s, "is_given": slo is not None},
            "reference_capacity_per_s": max(point.rate for point in points_of(curve, reference.name)),
            "knee_per_s": at.rate,
            "loads": dict(zip(LOADS, (load.value for load in loads), strict=True)),
        }
        title = "Every strategy, the baselines and the peers, at three loads"
        stage = replace(base, name="compare", title=title, loads=loads, load_names=tuple(LOADS))
        result = self.experiment.measure(stage)
        by_load = {name: comparison(result, index, ours, reference.name) for index, name in enumerate(LOADS)}
        self.recorder.extra |= {"comparisons": by_load, **by_load["the knee"]}

    def _alone(self, reference: Target) -> float:
        """Return median seconds of lone one-token requests; raise `BenchError` if none is answered."""
        one_token = replace(self.base.workload, outputs=Lengths("constant", 1, 1.0, 1))
        result = self.experiment.measure(
            replace(
                self.base,
                name="alone",
                title=f"One request after the other at {reference.name}, one token each",
                targets=(reference,),
                loads=(Load("closed", 1),),
                workload=one_token,
                max_requests=ALONE_REQUESTS,
                repeats=1,
            )
        )
        times = [o.first_token for o in result.outcomes(reference.name, 0)[0] if o.first_token is not None]
        if not times:
            raise BenchError(f"target {reference.name} answered no request: there is nothing to compare with")
        return quantile(times, 0.5)

    def batch_sizes(self) -> None:
        loads = tuple(Load("closed", size) for size in BATCH_SIZES)
        self.experiment.measure(
            replace(self.base, name="batch", title="Throughput and latency over the batch size", loads=loads)
        )

    def rates(self, measure: Target) -> None:
        """Measure 10, 100 and 500 requests/s, scaled so that 100 is `measure`'s capacity."""
        capacity = self.capacity(measure)
        scale = capacity / RATE_OF_CAPACITY
        loads = tuple(Load("poisson", round(rate * scale, 3)) for rate in RATES)
        self.recorder.extra |= {
            "capacity_per_s": capacity,
            "rates": {f"{rate}/s": load.value for rate, load in zip(RATES, loads, strict=True)},
        }
        title = "A tenth of the capacity, all of it, and five times as much"
        names = tuple(f"{rate}/s" for rate in RATES)
        self.experiment.measure(replace(self.base, name="rates", title=title, loads=loads, load_names=names))

    def offline(self, ours: str) -> None:
        count = self.base.max_requests or OFFLINE_REQUESTS
        stage = replace(
            self.base, name="offline", title=f"{count} requests at once", loads=(Load("all"),), max_requests=count
        )
        result = self.experiment.measure(stage)
        self.recorder.extra |= offline_ratios(result, ours)

    def efficiency(self, ours: str) -> None:
        """Measure how much of its own best speed each engine keeps.

        Mixed lengths compare with equal ones, a shared prompt with separate ones as long. The ratios judge scheduler
        and cache, whatever the arithmetic.
        """
        base = self.base.workload
        stages = [
            replace(
                self.base,
                name=name,
                title=f"At once: {name}",
                loads=(Load("all"),),
                load_names=(name,),
                max_requests=self.base.max_requests or OFFLINE_REQUESTS,
                workload=replace(workload, vocab=base.vocab, max_tokens=base.max_tokens),
            )
            for name, workload in EFFICIENCY.items()
        ]
        results = self.experiment.measure_in_turns(stages)
        self.recorder.extra |= efficiency_ratios(
            {result.stage.name: offline_speeds(result) for result in results}, ours
        )

    def capacity(self, target: Target) -> float:
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
        loads = result.stage.loads
        is_ramp = all(load.rate is not None for load in loads) or all(load.kind == "closed" for load in loads)
        if len(loads) < 3 or not is_ramp:
            return
        for target in result.stage.targets:
            with contextlib.suppress(BenchError):  # no knee, but figures
                knees = self.recorder.extra.setdefault("knees_per_s", {})
                knees[target.name] = knee_of(result, target.name).rate


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
