"""What is concluded from measurements."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.bench.runs import measured, outcome, recorder, stage
from tidewheel.bench import BenchError
from tidewheel.bench.arrivals import LoadPattern
from tidewheel.bench.capacity import CapacitySearch
from tidewheel.bench.outcome import RequestOutcome, Slo
from tidewheel.bench.results import StageResult
from tidewheel.bench.run_plan import PlannedRun, PlannedStage
from tidewheel.bench.suites import BenchSuite, efficiency_ratios, lone_tpot, offline_ratios
from tidewheel.bench.targets import BenchTarget


def test_offline_speeds_are_compared_pair_by_pair() -> None:
    speeds = {"llm": 0.01, "vllm": 0.02, "transformers": 0.04}

    def run_of(run: PlannedRun) -> list[RequestOutcome]:
        drift = 1.0 + run.repeat  # the machine gets slower
        return [outcome(ttft=0.0, tpot=speeds[run.target.name] * drift, tokens=101) for _ in range(4)]

    of = stage(loads=[LoadPattern("all")], targets=tuple(BenchTarget(name, name) for name in speeds))
    findings = offline_ratios(measured(of, run_of), "llm")
    assert findings["vllm_cpu_ratio"] == pytest.approx(2.0)
    assert findings["offline_ratios"]["transformers"][0] == pytest.approx(4.0)
    assert "llm" not in findings["offline_ratios"]


def test_efficiency_compares_each_engine_with_itself() -> None:
    speeds = {
        "mixed lengths": {"llm": [90.0, 45.0], "vllm": [50.0, 25.0]},
        "equal lengths": {"llm": [100.0, 50.0], "vllm": [100.0, 50.0]},
        "a shared prompt": {"llm": [30.0], "vllm": [60.0]},
        "prompts of their own": {"llm": [10.0], "vllm": [30.0]},
    }
    findings = efficiency_ratios(speeds, "llm")
    assert findings["scheduling_efficiency"]["llm"][0] == pytest.approx(0.9)
    assert findings["scheduling_efficiency_ratios"] == {"vllm": pytest.approx(1.8)}
    assert findings["prefix_caching_gain"]["vllm"][0] == pytest.approx(2.0)
    assert findings["prefix_caching_gain_ratios"] == {"vllm": pytest.approx(1.5)}


def test_the_time_per_token_of_a_request_alone() -> None:
    whole = [outcome(ttft=0.1 + 0.02 * (n - 1), tpot=0.0, tokens=n, streamed=False) for n in (2, 11, 31)]
    assert lone_tpot(whole, 0.1) == pytest.approx(0.02)
    assert lone_tpot([outcome(ttft=9.0, tpot=0.03, tokens=5)], 0.1) == pytest.approx(0.03)
    with pytest.raises(BenchError, match="give --ttft and --tpot"):
        lone_tpot([outcome(tokens=1), outcome(code="TIMEOUT")], 0.1)


class Measured:
    """An experiment whose targets serve 10 requests/s, ours 100, and get slow beyond that."""

    def __init__(self) -> None:
        self.stages: list[PlannedStage] = []
        self.runs: list[PlannedRun] = []

    def measure(self, of: PlannedStage) -> StageResult:
        self.stages.append(of)
        return measured(of, self._run)

    def measure_in_turns(self, stages: Sequence[PlannedStage]) -> list[StageResult]:
        return [self.measure(of) for of in stages]

    def find_capacities(
        self, of: PlannedStage, searches: Mapping[str, CapacitySearch], budget_s: float
    ) -> StageResult:
        self.stages.append(of)
        for target in of.targets:
            while target.name in searches and (point := searches[target.name].next_point()) is not None:
                run = PlannedRun(target, LoadPattern("poisson", point.rate), 0, of.seed)
                searches[target.name].note(point, self._run(run))
        return StageResult(of)

    def _run(self, run: PlannedRun) -> list[RequestOutcome]:
        self.runs.append(run)
        is_baseline = run.target.name == "baseline_dynamic"
        capacity = 10.0 if is_baseline else 100.0
        if run.load.kind == "all":
            return [outcome(ttft=40 / capacity, tpot=0.0, tokens=9) for _ in range(40)]
        if run.load.kind == "closed":
            per_s = min(capacity, 2.5 * run.load.value)
            latency = run.load.value / per_s
            return [outcome(sent=index / per_s, ttft=latency, tpot=0.0, tokens=9) for index in range(50)]
        ttft = 0.2 if run.load.value <= capacity else 9.0
        return [outcome(sent=i / run.load.value, ttft=ttft, tokens=1, streamed=not is_baseline) for i in range(40)]


def compared(tmp_path: Path, experiment: Measured, slo: Slo | None = None) -> dict[str, Any]:
    one = recorder(tmp_path)
    suite = BenchSuite(experiment, one, stage(loads=[]))  # type: ignore[arg-type]
    suite.compare(slo)
    return one.extra


def test_capacities_are_found_and_compared(tmp_path: Path) -> None:
    experiment = Measured()
    findings = compared(tmp_path, experiment)
    alone, also_alone, at_once, capacity = experiment.stages
    assert [[target.name for target in of.targets] for of in (alone, also_alone)] == [["baseline_dynamic"]] * 2
    assert [of.is_preliminary for of in experiment.stages] == [True, True, True, False]
    assert [target.name for target in (*at_once.targets, *capacity.targets)] == ["continuous", "baseline_dynamic"] * 2
    assert capacity.longest_s == 4 * capacity.seconds
    whole = findings["capacities"]["whole answer"]
    assert whole["continuous"]["bracket"][0] <= 100.0 < whole["continuous"]["bracket"][1]
    assert whole["baseline_dynamic"]["bracket"][0] <= 10.0 < whole["baseline_dynamic"]["bracket"][1]
    assert set(findings["capacities"]["stream"]) == {"continuous"}
    assert findings["capacities"]["stream"]["continuous"]["ratio"] is None  # the baseline has none
    assert findings["capacity_ratio"] == pytest.approx(10.0, rel=0.1)
    low, high = whole["continuous"]["ratio"][1:]
    assert low <= 10.0 <= high


def test_the_objective_is_a_multiple_of_a_request_alone(tmp_path: Path) -> None:
    experiment = Measured()
    findings = compared(tmp_path, experiment)
    assert experiment.stages[-1].slo.ttft_s == pytest.approx(4.0)  # alone it takes 0.4 s
    assert findings["objective"] == {"ttft_s": 4.0, "tpot_s": 0.0, "is_given": False}


def test_an_objective_that_is_given_holds(tmp_path: Path) -> None:
    experiment = Measured()
    compared(tmp_path, experiment, Slo(0.7, 0.07))
    assert experiment.stages[-1].slo == Slo(0.7, 0.07)


def test_a_target_that_answers_nothing_is_not_searched(tmp_path: Path) -> None:
    class HalfDead(Measured):
        def _run(self, run: PlannedRun) -> list[RequestOutcome]:
            return [outcome(code="TIMEOUT")] if run.target.name == "continuous" else super()._run(run)

    findings = compared(tmp_path, HalfDead())
    assert set(findings["capacities"]["whole answer"]) == {"baseline_dynamic"}
    assert findings["capacity_ratio"] is None


def test_an_interrupted_search_keeps_what_it_found(tmp_path: Path) -> None:
    class Interrupted(Measured):
        def _run(self, run: PlannedRun) -> list[RequestOutcome]:
            if run.target.name == "baseline_dynamic" and run.load.kind == "poisson":
                raise KeyboardInterrupt
            return super()._run(run)

    one = recorder(tmp_path)
    suite = BenchSuite(Interrupted(), one, stage(loads=[]))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        suite.compare()
    assert set(one.extra["capacities"]["whole answer"]) == {"continuous"}


def test_rates_are_scaled_to_the_machine(tmp_path: Path) -> None:
    experiment = Measured()
    one = recorder(tmp_path)
    suite = BenchSuite(experiment, one, stage(("baseline_dynamic",), loads=[]))  # type: ignore[arg-type]
    suite.rates()
    capacity = one.extra["saturation_per_s"]
    assert [load.value for load in experiment.stages[1].loads] == pytest.approx(
        [capacity / 10, capacity, capacity * 5], rel=0.01
    )


def test_the_mix_runs_below_and_above_saturation_and_its_critical_streams_alone(tmp_path: Path) -> None:
    experiment, one = Measured(), recorder(tmp_path)
    BenchSuite(experiment, one, stage(("continuous", "baseline_dynamic"), loads=[])).mix()  # type: ignore[arg-type]
    saturation = one.extra["saturation_per_s"]
    _, mixed, alone = experiment.stages
    assert [load.value for load in mixed.loads] == pytest.approx([0.6 * saturation, 1.5 * saturation], rel=0.01)
    assert [load.value for load in alone.loads] == pytest.approx([load.value / 5 for load in mixed.loads], rel=0.01)
    assert {turn.parameters["priority"] for (turn,) in itertools.islice(alone.workload.conversations(0), 20)} == {1}
    assert set(one.extra["mix"]) == {"60%", "150%"} and set(one.extra["mix"]["60%"]) == {
        "continuous",
        "baseline_dynamic",
    }


def test_efficiency_is_measured_on_lengths_of_the_same_mean(tmp_path: Path) -> None:
    experiment = Measured()
    one = recorder(tmp_path)
    of = stage(("llm", "vllm"), loads=[], max_requests=40)
    BenchSuite(experiment, one, of).efficiency()  # type: ignore[arg-type]
    mixed, equal, shared, own = (
        list(itertools.islice(of.conversations(run), 40)) for of in experiment.stages for run in [next(of.runs())]
    )
    for tested, plain in ((mixed, equal), (shared, own)):
        lengths = [statistics.fmean(len(turn.input_ids) for (turn,) in work) for work in (tested, plain)]
        assert lengths[0] == pytest.approx(lengths[1], rel=0.15)
    assert len({tuple(turn.input_ids[:256]) for (turn,) in shared}) == 1
    assert len({tuple(turn.input_ids[:256]) for (turn,) in own}) == 40
    assert set(one.extra["scheduling_efficiency"]) == {"llm", "vllm"}
    assert one.extra["prefix_caching_gain_ratios"] == {"vllm": pytest.approx(1.0)}


def test_batch_sizes_go_up_to_128(tmp_path: Path) -> None:
    experiment = Measured()
    BenchSuite(experiment, recorder(tmp_path), stage(["continuous"], loads=[])).batch_sizes()  # type: ignore[arg-type]
    assert [int(load.value) for load in experiment.stages[0].loads] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_a_target_that_answers_nothing_cannot_be_saturated(tmp_path: Path) -> None:
    class Dead(Measured):
        def measure(self, of: PlannedStage) -> StageResult:
            return measured(of, lambda run: [outcome(code="TIMEOUT")])

    suite = BenchSuite(Dead(), recorder(tmp_path), stage(loads=[]))  # type: ignore[arg-type]
    with pytest.raises(BenchError, match="target continuous answered no request in full"):
        suite.rates()
