import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tidewheel.bench import BenchError
from tidewheel.bench.arrivals import LoadPattern
from tidewheel.bench.capacity import GOAL, WHOLE_ANSWER, CapacityBracket, CapacitySearch
from tidewheel.bench.estimates import UNKNOWN, Estimate, quantile, ratio_interval
from tidewheel.bench.experiment import Experiment
from tidewheel.bench.outcome import RequestOutcome, Slo
from tidewheel.bench.results import ResultRecorder, StageResult
from tidewheel.bench.run_plan import PlannedStage
from tidewheel.bench.summary import rates
from tidewheel.bench.targets import BenchTarget
from tidewheel.bench.workloads import CRITICAL_SHARE, MIX, WORKLOADS
from tidewheel.workload.lengths import LengthRange, Lengths

ALONE_REQUESTS = 20
AT_ONCE_REQUESTS = 32
# Of a lone request: ten times 20 ms still feels prompt, five times its pace still streams.
TTFT_MULTIPLE, TPOT_MULTIPLE = 10.0, 5.0
LONGEST = 4.0  # time of an undecided point over the shortest
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SATURATION_USERS = 64
RATES = (10, 100, 500)  # requests/s
RATE_OF_SATURATION = 100
MIX_LOADS = (0.6, 1.5)  # of what saturates our target
OFFLINE_REQUESTS = 64
_EQUAL = Lengths("constant", 72, maximum=72)
# Mean lengths agree in the first two, and in the last two.
EFFICIENCY = {
    "mixed lengths": WORKLOADS["mixed"],
    "equal lengths": replace(WORKLOADS["fixed"], inputs=_EQUAL, outputs=_EQUAL),
    "a shared prompt": WORKLOADS["shared-prefix"],
    "prompts of their own": replace(WORKLOADS["mixed"], inputs=LengthRange(272, 384)),
}
EFFICIENCIES = {
    "scheduling_efficiency": ("mixed lengths", "equal lengths"),
    "prefix_caching_gain": ("a shared prompt", "prompts of their own"),
}
Speeds = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class BenchSuite:
    experiment: Experiment
    recorder: ResultRecorder
    base: PlannedStage

    @property
    def ours(self) -> BenchTarget:
        targets = self.base.targets
        return next((target for target in targets if target.name in ("continuous", "llm")), targets[0])

    @property
    def reference(self) -> BenchTarget:
        baselines = [target for target in self.base.targets if target.kind == "baseline"]
        for target in sorted(baselines, key=lambda target: target.name != "baseline_dynamic"):
            return target
        raise BenchError("--suite compare needs a baseline among its targets: baseline_dynamic")

    def run(self) -> None:
        self.experiment.measure(self.base)

    def compare(self, slo: Slo | None = None, budget_s: float = math.inf) -> None:
        """Find each target's capacity within about `budget_s`.

        Without `slo`, the objective is a multiple of the reference's TTFT and TPOT for lone requests.
        """
        reference = self.reference
        lone_ttft, lone_tpot = self._alone(reference)
        slo_of_all = slo or Slo(_rounded(TTFT_MULTIPLE * lone_ttft), _rounded(TPOT_MULTIPLE * lone_tpot))
        self.recorder.extra |= {
            "reference": reference.name,
            "unloaded": {"ttft_s": lone_ttft, "tpot_s": lone_tpot},
            "objective": {"ttft_s": slo_of_all.ttft_s, "tpot_s": slo_of_all.tpot_s, "is_given": slo is not None},
            "goal": GOAL,
        }
        at_once = self._at_once("at once", AT_ONCE_REQUESTS, repeats=1, is_preliminary=True)
        starts = {target.name: _served_per_s(at_once, target.name) for target in self.base.targets}
        searches = {name: CapacitySearch(slo_of_all, _rounded(start)) for name, start in starts.items() if start > 0}
        title = "Capacity: the highest rate at which 90 % of requests meet the objective"
        longest_s = LONGEST * self.base.seconds
        stage = self._stage("capacity", title, slo=slo_of_all, longest_s=longest_s)
        try:
            self.experiment.find_capacities(stage, searches, budget_s)
        finally:
            found = {name: search.capacities() for name, search in searches.items()}
            self.recorder.extra |= capacity_findings(found, self.ours.name, reference.name)

    def _alone(self, reference: BenchTarget) -> tuple[float, float]:
        title = f"One request after the other at {reference.name}"
        stage = self._stage(
            "alone",
            title,
            targets=(reference,),
            loads=(LoadPattern("closed", 1),),
            seconds=LONGEST * self.base.seconds,
            max_requests=ALONE_REQUESTS,
            repeats=1,
            is_preliminary=True,
        )
        one_token = replace(stage.workload, outputs=Lengths("constant", 1, maximum=1))
        title += ", one token each"
        stages = [replace(stage, name="first token alone", title=title, workload=one_token), stage]
        firsts, wholes = (r.outcomes(reference.name, 0)[0] for r in self.experiment.measure_in_turns(stages))
        times = [o.first_token for o in firsts if o.first_token is not None]
        if not times:
            raise BenchError(f"target {reference.name} answered no request: there is nothing to compare with")
        ttft = quantile(times, 0.5)
        return ttft, lone_tpot(wholes, ttft)

    def batch_sizes(self) -> None:
        loads = tuple(LoadPattern("closed", size) for size in BATCH_SIZES)
        self._measure("batch", "Throughput and latency over the batch size", loads=loads)

    def rates(self) -> None:
        """Measure three loads in the ratio 1:10:50. The middle load saturates our target."""
        measure = self.ours
        saturation = self._saturation(measure)
        loads = tuple(LoadPattern("poisson", round(rate * saturation / RATE_OF_SATURATION, 3)) for rate in RATES)
        names = tuple(f"{rate}/s" for rate in RATES)
        values = (load.value for load in loads)
        self.recorder.extra |= {"saturation_per_s": saturation, "rates": dict(zip(names, values, strict=True))}
        title = "A tenth of what saturates the machine, all of it, and five times as much"
        self._measure("rates", title, loads=loads, load_names=names)

    def mix(self) -> None:
        """Measure the mix below and above what saturates our target, and its CRITICAL streams alone, in turns."""
        saturation = self._saturation(self.ours)
        rates = [round(load * saturation, 3) for load in MIX_LOADS]
        names = tuple(f"{load:.0%}" for load in MIX_LOADS)
        loads = tuple(LoadPattern("poisson", rate) for rate in rates)
        alone = tuple(LoadPattern("poisson", round(CRITICAL_SHARE * rate, 3)) for rate in rates)
        critical = replace(self.base.workload, name="critical", kinds=MIX[:1])
        results = self.experiment.measure_in_turns(
            [
                self._stage("mix", "Text, images and speech", loads=loads, load_names=names),
                self._stage("critical", "Its CRITICAL streams", loads=alone, load_names=names, workload=critical),
            ]
        )
        self.recorder.extra |= {"saturation_per_s": saturation, "mix": mix_findings(*results)}

    def _saturation(self, target: BenchTarget) -> float:
        """Return requests/s of many users in a closed loop. Raise `BenchError` if none is answered."""
        users, title = (LoadPattern("closed", SATURATION_USERS),), f"Saturation of {target.name}"
        result = self._measure("saturation", title, targets=(target,), loads=users, repeats=1, is_preliminary=True)
        if not (saturation := _served_per_s(result, target.name)):
            raise BenchError(f"target {target.name} answered no request in full: there is no load to scale to")
        return saturation

    def offline(self) -> None:
        count = self.base.max_requests or OFFLINE_REQUESTS
        self.recorder.extra |= offline_ratios(self._at_once("offline", count), self.ours.name)

    def efficiency(self) -> None:
        base = self.base.workload
        stages = [
            self._stage(
                name,
                f"At once: {name}",
                loads=(LoadPattern("all"),),
                load_names=(name,),
                max_requests=self.base.max_requests or OFFLINE_REQUESTS,
                workload=replace(workload, vocab=base.vocab, max_tokens=base.max_tokens),
            )
            for name, workload in EFFICIENCY.items()
        ]
        results = self.experiment.measure_in_turns(stages)
        speeds = {result.stage.name: offline_speeds(result) for result in results}
        self.recorder.extra |= efficiency_ratios(speeds, self.ours.name)

    def _at_once(self, name: str, count: int, **changes: Any) -> StageResult:
        return self._measure(
            name, f"{count} requests at once", loads=(LoadPattern("all"),), max_requests=count, **changes
        )

    def _measure(self, name: str, title: str, **changes: Any) -> StageResult:
        return self.experiment.measure(self._stage(name, title, **changes))

    def _stage(self, name: str, title: str, **changes: Any) -> PlannedStage:
        return replace(self.base, name=name, title=title, **changes)


def lone_tpot(outcomes: Sequence[RequestOutcome], ttft: float) -> float:
    """Return the median TPOT in seconds of requests that ran alone. Raise `BenchError` if none was answered.

    `ttft`: assumed seconds to the first token of answers that were not streamed.
    """
    times = [
        o.tpot if o.tpot is not None else max(0.0, o.last_token - ttft) / (o.num_tokens - 1)
        for o in outcomes
        if o.is_complete and o.num_tokens > 1 and o.last_token is not None
    ]
    if not times:
        raise BenchError("no request was answered alone: there is no objective to derive; give --ttft and --tpot")
    return quantile(times, 0.5)


def capacity_findings(
    found: Mapping[str, Mapping[str, CapacityBracket]], ours: str, reference: str
) -> dict[str, Any]:
    findings: dict[str, Any] = {"capacities": {}}
    for target, capacities in found.items():
        for objective, capacity in capacities.items():
            theirs = found.get(reference, {}).get(objective)
            ratio, is_bound = capacity.over(theirs) if theirs and target != reference else (UNKNOWN, False)
            findings["capacities"].setdefault(objective, {})[target] = {
                **capacity.summary(),
                "ratio": None if math.isnan(ratio.mean) else list(ratio),
                "ratio_is_lower_bound": is_bound,
            }
    mine = findings["capacities"].get(WHOLE_ANSWER, {}).get(ours, {})
    findings["capacity_ratio"] = (mine.get("ratio") or [None])[0]
    findings["capacity_ratio_is_lower_bound"] = mine.get("ratio_is_lower_bound", False)
    return findings


def mix_findings(mixed: StageResult, alone: StageResult) -> dict[str, Any]:
    """Return by load and target: goodput, and the p99 gap of CRITICAL streams in the mix and alone, in seconds."""
    findings: dict[str, Any] = {}
    for index, name in enumerate(mixed.stage.load_names):
        for target in mixed.stage.targets:
            here, there = mixed.figures(target.name, index), alone.figures(target.name, index)
            if here and there:
                critical = here.get("classes", {}).get("critical", {})
                findings.setdefault(name, {})[target.name] = {
                    "goodput_per_s": here["goodput_per_s"].mean,
                    "critical_gap_s": critical.get("itl_s", {}).get("p99", math.nan),
                    "critical_gap_alone_s": there["itl_s"]["p99"].mean,
                }
    return findings


def offline_speeds(result: StageResult) -> Speeds:
    slo = result.stage.slo
    return {
        target.name: [rates(one, slo, None)["output_tokens_per_s"] for one in result.outcomes(target.name, 0)]
        for target in result.stage.targets
    }


def offline_ratios(result: StageResult, ours: str) -> dict[str, Any]:
    speeds = offline_speeds(result)
    findings: dict[str, Any] = {"offline_ratios": {}}
    for target in result.stage.targets:
        if target.name == ours or not speeds[target.name] or not speeds[ours]:
            continue
        ratio = _paired(speeds[ours], speeds[target.name])
        findings["offline_ratios"][target.name] = list(ratio)
        if target.kind == "vllm":
            findings |= {"vllm_cpu_ratio": ratio.mean, "vllm_cpu_ratio_interval": [ratio.low, ratio.high]}
    return findings


def efficiency_ratios(speeds: Mapping[str, Speeds], ours: str) -> dict[str, Any]:
    findings: dict[str, Any] = {}
    for name, (tested, plain) in EFFICIENCIES.items():
        by_target = {target: _paired(values, speeds[plain][target]) for target, values in speeds[tested].items()}
        mine = by_target[ours].mean
        findings[name] = {target: list(ratio) for target, ratio in by_target.items()}
        findings[f"{name}_ratios"] = {t: mine / ratio.mean for t, ratio in by_target.items() if t != ours}
    return findings


def _paired(mine: list[float], theirs: list[float]) -> Estimate:
    count = min(len(mine), len(theirs))
    return ratio_interval(mine[:count], theirs[:count])


def _served_per_s(result: StageResult, target: str) -> float:
    rate = result.figures(target, 0).get("requests_per_s", UNKNOWN).mean
    return float(rate) if rate > 0 else 0.0


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
