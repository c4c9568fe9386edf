"""Simulated drafts: requests get their tokens, in fewer steps where drafts are right; recordings show how often."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from support.simulate.simulation import make_trace
from tidewheel.config import EngineConfig
from tidewheel.simulate.calibration import calibrated
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.outcomes import FINISHED
from tidewheel.simulate.replay import Recording, replay, scheduler_of
from tidewheel.simulate.scenario import simulated_info, simulator_of
from tidewheel.simulate.simulator import Simulator
from tidewheel.workload.traces import Trace

FLAT = CostModel(
    name="flat",
    overhead_s=0.01,
    seconds_per_token=(1e-5,),
    turn_overhead_s=1e-4,
    draft_acceptance=0.7,
    num_blocks=500,
)
MOST = 8


def simulator(
    trace: Trace, cost: CostModel = FLAT, *, speculation: str = "prompt_lookup", **settings: object
) -> Simulator:
    values = {"max_num_seqs": 8, "num_speculative_tokens": MOST, "draft_model": "d", **settings}
    if speculation != "draft_model":
        del values["draft_model"]
    config = EngineConfig.from_settings({"model": "m", "speculation": speculation, **values})
    info = simulated_info(config, cost, max_model_len=trace.max_num_tokens + 1)
    return simulator_of(config, info, trace, cost)


def one_request(num_tokens: int = 2000) -> Trace:
    return make_trace(1, prompt="constant:8", output=f"constant:{num_tokens}")


@pytest.mark.parametrize("speculation", ["prompt_lookup", "draft_model"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"async_scheduling": True}, {"enable_prefix_caching": False}, {"num_blocks": 12, "block_size": 16}],
    ids=str,
)
def test_every_request_ends_once_with_its_tokens(speculation: str, settings: dict[str, object]) -> None:
    trace = make_trace(200, rate=15.0, output="uniform:40")
    run = simulator(trace, speculation=speculation, **settings)
    outcomes = run.run()
    assert (outcomes.ends == FINISHED).all()
    np.testing.assert_array_equal(outcomes.output_tokens, trace.output_tokens)
    drafts = run.summary()["drafts"]
    assert 0 < drafts["accepted_share"] < 1
    assert drafts["accepted_per_step"] > 0.5
    if "num_blocks" in settings:
        assert outcomes.preemptions.sum() > 0


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_steps_give_the_tokens_that_the_acceptance_lets_expect(acceptance: float) -> None:
    """1 + p + … + p^k tokens of a step with k drafts, where drafts cost next to nothing."""
    cost = dataclasses.replace(FLAT, draft_acceptance=acceptance, seconds_per_token=(1e-9,))
    run = simulator(one_request(), cost)
    run.run()
    expected = sum(acceptance**depth for depth in range(MOST + 1))
    assert 2000 / run.replicas[0].num_steps == pytest.approx(expected, rel=0.15)  # acceptance is learned first


def test_the_number_of_rows_does_not_change_what_drafts_of_one_are_worth() -> None:
    latencies = [simulator(one_request(500), max_num_seqs=count).run().latency[0] for count in (1, 64)]
    assert latencies[0] == pytest.approx(latencies[1], rel=0.05)


def test_drafts_that_take_long_to_make_are_not_chosen() -> None:
    cost = dataclasses.replace(FLAT, seconds_per_draft=0.02)
    plain = simulator(one_request(), cost, speculation="none").run()
    drafting = simulator(one_request(), cost, speculation="draft_model").run()
    assert drafting.latency[0] < 1.03 * plain.latency[0]
    quick = dataclasses.replace(cost, seconds_per_draft=0.0005)
    assert simulator(one_request(), quick, speculation="draft_model").run().latency[0] < 0.6 * plain.latency[0]


@pytest.mark.parametrize(("speculation", "seconds"), [("prompt_lookup", 0.0), ("draft_model", 0.002)])
def test_a_recording_replays_and_shows_what_drafts_are_worth(
    tmp_path: Path, speculation: str, seconds: float
) -> None:
    cost = dataclasses.replace(FLAT, seconds_per_draft=seconds)
    trace = make_trace(150, rate=4.0, output="uniform:40")
    run = simulator(trace, cost, speculation=speculation, record=str(tmp_path))
    run.run()
    (path,) = tmp_path.glob("*.jsonl")
    recording = Recording(path)
    assert replay(recording, scheduler_of(recording.header)).difference == ""
    found = calibrated(path)
    assert found.draft_acceptance == pytest.approx(0.7, abs=0.05)
    assert found.seconds_per_draft == pytest.approx(seconds, abs=2e-4)
    assert found.fit["r_squared"] > 0.9
    repeated = simulator(trace, found, speculation=speculation)
    assert repeated.run().latency.mean() == pytest.approx(run.outcomes.latency.mean(), rel=0.05)


def test_a_recording_without_drafts_says_nothing_of_them(tmp_path: Path) -> None:
    run = simulator(make_trace(100), speculation="none", record=str(tmp_path))
    run.run()
    assert calibrated(next(tmp_path.glob("*.jsonl"))).draft_acceptance is None
