"""What is concluded from measurements."""

from __future__ import annotations

import pytest

from support.bench import measured, outcome, stage
from tidewheel.bench.arrivals import Load
from tidewheel.bench.errors import BenchError
from tidewheel.bench.plan import Run
from tidewheel.bench.suites import comparison, knee_index, offline_ratios
from tidewheel.bench.targets import Target
from tidewheel.bench.values import Outcome

LOADS = tuple(Load("poisson", rate) for rate in (1.0, 2.0, 3.0))


def test_the_knee_is_that_of_the_p99_latency() -> None:
    def hockey_stick(run: Run) -> list[Outcome]:
        return [outcome(ttft=0.1 if run.load.value < 3 else 5.0) for _ in range(10)]

    assert knee_index(measured(stage(loads=LOADS), hockey_stick), "continuous") == 1


def test_loads_without_requests_have_no_place_on_the_curve() -> None:
    def nothing_at_first(run: Run) -> list[Outcome]:
        if run.load.value < 2:
            return []
        return [outcome(code="TIMEOUT")] if run.load.value > 4 else [outcome(ttft=0.1)]

    loads = [Load("poisson", rate) for rate in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert knee_index(measured(stage(loads=loads), nothing_at_first), "continuous") == 3


def test_two_points_have_no_knee() -> None:
    result = measured(stage(loads=LOADS), lambda run: [outcome()] if run.load.value > 1 else [])
    with pytest.raises(BenchError, match="too few requests to find the knee of continuous"):
        knee_index(result, "continuous")


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
