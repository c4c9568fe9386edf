"""What is concluded from measurements."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.bench.runs import measured, outcome, recorder, stage
from tidewheel.bench import BenchError
from tidewheel.bench.arrivals import Load
from tidewheel.bench.findings import comparison, efficiency_ratios, lone_tpot, offline_ratios
from tidewheel.bench.knee import curve, knee_of
from tidewheel.bench.outcome import Outcome, Slo
from tidewheel.bench.results import StageResult
from tidewheel.bench.stage import Run, Stage
from tidewheel.bench.suites import Suite
from tidewheel.bench.targets import Target

LOADS = tuple(Load("poisson", rate) for rate in (1.0, 2.0, 3.0))


def test_the_knee_is_that_of_the_mean_latency() -> None:
    def hockey_stick(run: Run) -> list[Outcome]:
        return [outcome(ttft=0.1 if run.load.value < 3 else 5.0) for _ in range(10)]

    assert knee_of(measured(stage(loads=LOADS), hockey_stick), "continuous").rate == pytest.approx(2.0)


def test_loads_without_requests_have_no_place_on_the_curve() -> None:
    def nothing_at_first(run: Run) -> list[Outcome]:
        if run.load.value < 2:
            return []
        return [outcome(code="TIMEOUT")] if run.load.value > 4 else [outcome(ttft=0.1)]

    loads = [Load("poisson", rate) for rate in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert knee_of(measured(stage(loads=loads), nothing_at_first), "continuous").load == 3


def test_the_curve_of_requests_in_flight_is_over_what_came_of_them() -> None:
    def saturated_at_four(run: Run) -> list[Outcome]:
        users = int(run.load.value)
        per_s = min(4, users)
        return [outcome(sent=i / per_s, ttft=users / per_s, tokens=1) for i in range(40)]

    loads = [Load("closed", users) for users in (1, 2, 4, 8)]
    points = curve(measured(stage(loads=loads, repeats=1), saturated_at_four), "continuous")
    assert [point.load for point in points] == [0, 1, 2]  # the last sends more, and gets no more
    assert [point.latency for point in points] == pytest.approx([1.0, 1.0, 1.0])
    assert points[0].rate == pytest.approx(40 / 40)
    assert knee_of(measured(stage(loads=loads, repeats=1), saturated_at_four), "continuous").load == 2


def test_two_points_have_no_knee() -> None:
    result = measured(stage(loads=LOADS), lambda run: [outcome()] if run.load.value > 1 else [])
    with pytest.raises(BenchError, match="too few requests to find the knee of continuous"):
        knee_of(result, "continuous")


def test_ours_over_the_reference() -> None:
    def twice_as_good(run: Run) -> list[Outcome]:
        if run.target.name == "continuous":
            return [outcome(ttft=0.2) for _ in range(20)]
        return [outcome(ttft=0.8) for _ in range(10)] + [outcome(ttft=2.0) for _ in range(10)]

    findings = comparison(measured(stage(loads=LOADS), twice_as_good), 1, "continuous", "baseline_dynamic")
    assert findings["goodput_ratio"] == pytest.approx(2.0)
    assert findings["goodput_ratio_is_lower_bound"] is False
    assert findings["p99_ttft_ratio"] == pytest.approx(0.1)
    assert findings["comparison_load"] == "2/s"


def test_a_reference_without_one_good_answer_gives_a_bound() -> None:
    def hopeless(run: Run) -> list[Outcome]:
        return [outcome(ttft=0.2 if run.target.name == "continuous" else 9.0) for _ in range(20)]

    findings = comparison(measured(stage(loads=LOADS), hopeless), 1, "continuous", "baseline_dynamic")
    assert findings["goodput_ratio"] == pytest.approx(20.0)  # it is taken to have had one
    assert findings["goodput_ratio_is_lower_bound"] is True


def test_repeats_without_one_good_answer_count_as_what_they_are() -> None:
    def good_once(run: Run) -> list[Outcome]:
        ttft = 0.2 if run.target.name == "continuous" or run.repeat == 0 else 9.0
        return [outcome(ttft=ttft) for _ in range(20)]

    findings = comparison(measured(stage(loads=LOADS), good_once), 1, "continuous", "baseline_dynamic")
    assert findings["goodput_ratio"] == pytest.approx(2.0)  # 40 good ones over 20
    assert findings["goodput_ratio_is_lower_bound"] is False


def test_a_reference_without_any_answer_has_no_time_to_first_token() -> None:
    def dead(run: Run) -> list[Outcome]:
        return [outcome() if run.target.name == "continuous" else outcome(code="TIMEOUT") for _ in range(5)]

    findings = comparison(measured(stage(loads=LOADS), dead), 1, "continuous", "baseline_dynamic")
    assert findings["p99_ttft_ratio"] is None
    assert findings["p99_ttft_ratio_reason"]


def test_offline_speeds_are_compared_pair_by_pair() -> None:
    speeds = {"llm": 0.01, "vllm": 0.02, "transformers": 0.04}

    def run_of(run: Run) -> list[Outcome]:
        drift = 1.0 + run.repeat  # the machine gets slower
        return [outcome(ttft=0.0, tpot=speeds[run.target.name] * drift, tokens=101) for _ in range(4)]

    of = stage(loads=[Load("all")], targets=tuple(Target(name, name) for name in speeds))
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
    assert lone_tpot([whole], 0.1) == pytest.approx(0.02)
    assert lone_tpot([[outcome(ttft=9.0, tpot=0.03, tokens=5)]], 0.1) == pytest.approx(0.03)
    with pytest.raises(BenchError, match="give --ttft and --tpot"):
        lone_tpot([[outcome(tokens=1), outcome(code="TIMEOUT")]], 0.1)


class Measured:
    """An experiment whose targets are queues. The baseline does 10 requests/s and gets slow, ours does not."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def measure(self, of: Stage) -> StageResult:
        self.stages.append(of)
        return measured(of, self._run)

    def measure_in_turns(self, stages: Sequence[Stage]) -> list[StageResult]:
        return [self.measure(of) for of in stages]

    @staticmethod
    def _run(run: Run) -> list[Outcome]:
        capacity = 10.0 if run.target.name == "baseline_dynamic" else 100.0
        if run.load.kind == "all":
            return [outcome() for _ in range(40)]
        if run.load.kind == "closed":
            per_s = min(capacity, 2.5 * run.load.value)
            latency = run.load.value / per_s
            return [outcome(sent=index / per_s, ttft=latency, tpot=0.0, tokens=9) for index in range(50)]
        ttft = 0.2 if run.load.value <= capacity else 9.0
        return [outcome(sent=index / run.load.value, ttft=ttft, tokens=1) for index in range(40)]


def test_a_comparison_is_made_around_the_knee_of_the_reference(tmp_path: Path) -> None:
    experiment = Measured()
    one = recorder(tmp_path)
    suite = Suite(experiment, one, stage(loads=[]))  # type: ignore[arg-type]
    baseline = suite.base.targets[1]
    suite.compare(baseline, "continuous")
    ramp, alone, compared = experiment.stages
    assert [[target.name for target in of.targets] for of in (ramp, alone)] == [["baseline_dynamic"]] * 2
    assert [of.repeats for of in (ramp, alone)] == [1, 1]
    assert one.extra["reference_capacity_per_s"] == pytest.approx(10.0, rel=0.1)
    assert one.extra["knee_per_s"] == pytest.approx(10.0, rel=0.1)
    knee = one.extra["knee_per_s"]
    assert [load.value for load in compared.loads] == pytest.approx([knee / 2, knee, 2 * knee], rel=0.01)
    assert [target.name for target in compared.targets] == ["continuous", "baseline_dynamic"]
    assert one.extra["goodput_ratio"] == pytest.approx(1.0)
    assert one.extra["comparisons"]["twice the knee"]["goodput_ratio_is_lower_bound"] is True
    assert one.extra["comparisons"]["twice the knee"]["p99_ttft_ratio"] == pytest.approx(0.2 / 9.0)


def test_the_objective_is_a_multiple_of_a_request_alone(tmp_path: Path) -> None:
    experiment = Measured()
    one = recorder(tmp_path)
    suite = Suite(experiment, one, stage(loads=[]))  # type: ignore[arg-type]
    suite.compare(suite.base.targets[1], "continuous")
    assert experiment.stages[-1].slo.ttft_s == pytest.approx(4.0)  # alone it takes 0.4 s
    assert one.extra["objective"] == {"ttft_s": 4.0, "tpot_s": 0.0, "is_given": False}


def test_an_objective_that_is_given_holds(tmp_path: Path) -> None:
    experiment = Measured()
    suite = Suite(experiment, recorder(tmp_path), stage(loads=[]))  # type: ignore[arg-type]
    suite.compare(suite.base.targets[1], "continuous", Slo(0.7, 0.07))
    assert experiment.stages[-1].slo == Slo(0.7, 0.07)


def test_rates_are_scaled_to_the_machine(tmp_path: Path) -> None:
    experiment = Measured()
    one = recorder(tmp_path)
    suite = Suite(experiment, one, stage(("baseline_dynamic",), loads=[]))  # type: ignore[arg-type]
    suite.rates(suite.base.targets[0])
    capacity = one.extra["capacity_per_s"]
    assert [load.value for load in experiment.stages[1].loads] == pytest.approx(
        [capacity / 10, capacity, capacity * 5], rel=0.01
    )


def test_efficiency_is_measured_on_lengths_of_the_same_mean(tmp_path: Path) -> None:
    experiment = Measured()
    one = recorder(tmp_path)
    of = stage(("llm", "vllm"), loads=[], max_requests=40)
    Suite(experiment, one, of).efficiency("llm")  # type: ignore[arg-type]
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
    Suite(experiment, recorder(tmp_path), stage(["continuous"], loads=[])).batch_sizes()  # type: ignore[arg-type]
    assert [int(load.value) for load in experiment.stages[0].loads] == [1, 2, 4, 8, 16, 32, 64, 128]


def test_a_target_that_answers_nothing_has_no_capacity(tmp_path: Path) -> None:
    class Dead(Measured):
        def measure(self, of: Stage) -> StageResult:
            return measured(of, lambda run: [outcome(code="TIMEOUT")])

    suite = Suite(Dead(), recorder(tmp_path), stage(loads=[]))  # type: ignore[arg-type]
    with pytest.raises(BenchError, match="target continuous answered no request in full"):
        suite.rates(suite.base.targets[0])
