"""`tidewheel tune` finds a planted fault, keeps what is good, and reads what users give it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support.simulate.simulation import make_trace
from tidewheel.cli.main import main
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.simulate.cost_model import CostModel
from tidewheel.simulate.recorded_load import trace_of
from tidewheel.simulate.replay import Recording
from tidewheel.simulate.tuning import GOODPUT, LATENCY, Search, Tuning, paired_difference
from tidewheel.workload.traces import Trace

COST = CostModel(name="device", overhead_s=0.02, seconds_per_token=(1e-5,), num_blocks=4000, block_size=16)


def tuned(trace: Trace, *, num_simulations: int = 12, seed: int = 0, **settings: object) -> Tuning:
    config = EngineConfig.from_settings({"model": "m", "max_num_seqs": 64, **settings})
    return Search(config, trace, COST, GOODPUT, num_simulations=num_simulations, seed=seed).run()


def write(path: Path, trace: Trace) -> Path:
    rows = zip(trace.arrivals.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    names = "arrival", "prompt_tokens", "output_tokens"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_planted_fault_is_found() -> None:
    trace = make_trace(120, rate=30.0, prompt="constant:16", output="constant:10")
    result = tuned(trace, max_num_seqs=1)
    (setting,) = result.settings
    assert setting.name == "max_num_seqs" and setting.now == 1
    assert isinstance(setting.proposed, int) and setting.proposed >= 4
    first = result.predictions[0]
    assert first.proposed > first.now + 0.5 and first.difference.low > 0.3
    assert result.num_simulations <= 12 and not result.is_complete


def test_good_settings_are_kept() -> None:
    result = tuned(make_trace(120, rate=4.0, prompt="constant:16", output="constant:10"), num_simulations=40)
    assert result == Tuning(found=(), predictions=(), num_simulations=result.num_simulations, is_complete=True)
    assert not result.settings


def test_equal_seeds_give_equal_results() -> None:
    trace = make_trace(120, rate=30.0, prompt="constant:16", output="geometric:10")
    assert tuned(trace, max_num_seqs=1, seed=3) == tuned(trace, max_num_seqs=1, seed=3)


def test_the_difference_is_of_pairs() -> None:
    noise = np.random.default_rng(0).exponential(10.0, 200)
    mean, low, high = paired_difference(LATENCY, noise, noise - 0.1, seed=0)
    assert (mean, low, high) == (pytest.approx(-0.1), pytest.approx(-0.1), pytest.approx(-0.1))
    assert LATENCY.gain(paired_difference(LATENCY, noise, noise - 0.1, seed=0)).low == pytest.approx(0.1)


def test_half_a_load_has_sessions_that_begin_anew() -> None:
    trace = Trace.of(
        [0, 1, 2, 3], [1] * 4, [1] * 4, sessions=[0, -1, 0, 0], session_names=("a",), pauses=[np.nan, np.nan, 5, 6]
    )
    half = trace.taken(np.array([False, False, True, True]))
    assert half.arrivals.tolist() == [0, 1]
    assert np.isnan(half.pauses[0]) and half.pauses[1] == 6


@pytest.mark.parametrize(
    ("count", "settings", "simulations", "text"),
    [
        (30, {}, 9, "the record has 30 requests: tune needs at least 100"),
        (120, {}, 3, "num_simulations is 3: it must be at least 4"),
        (120, {"pressure_quantization": "int8"}, 9, "quantized_share"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    count: int, settings: dict[str, object], simulations: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        tuned(make_trace(count), num_simulations=simulations, **settings)


def test_the_command_proposes_for_model_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    COST.save(tmp_path / "cost.json")
    record = write(tmp_path / "load.jsonl", make_trace(120, rate=30.0, prompt="constant:16", output="constant:10"))
    (tmp_path / "model.json").write_text('{"max_num_seqs": 1, "model": "x"}', encoding="utf-8")
    options = ["--settings", str(tmp_path / "model.json"), "--cost", str(tmp_path / "cost.json")]
    command = ["tune", str(record), *options, "--simulations", "8"]
    assert main(command) == 0
    *_, last = capsys.readouterr().out.splitlines()
    name, _, proposal = last.partition(": ")
    assert name == "for model.json" and json.loads(proposal)["max_num_seqs"] > 1
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["settings"] == json.loads(proposal) and result["is_better"]


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"arrival": -1}', '{"arrival": 0, "prompt_tokens": "x"}', "\x00", "[["]
)
def test_a_wrong_line_is_told_in_one(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = write(tmp_path / "load.jsonl", make_trace(3))
    with record.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    assert main(["tune", str(record)]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("tidewheel: error: ") and "line 4" in error


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--settings", "nowhere"], "--settings nowhere: no such file or folder"),
        (["--set", "max_num_seq=1"], "did you mean 'max_num_seqs'?"),
        (["--seed", "-1"], "--seed is -1: it must be at least 0"),
    ],
)
def test_wrong_options(options: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(write(tmp_path / "load.jsonl", make_trace(3))), *options]) in (1, 2)
    (error,) = capsys.readouterr().err.splitlines()
    assert text in error


def test_a_recording_gives_back_its_load(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    options = ["--requests", "60", "--rate", "50", "--prefixes", "2:256", "--prompt", "constant:64"]
    assert main(["simulate", *options, "--output", "uniform:8", "--record", str(folder), "--json", "-"]) == 0
    (path,) = folder.iterdir()
    trace = trace_of(Recording(path), path)
    assert len(trace) == 60 and set(trace.prompt_tokens.tolist()) == {320}
    assert 4 < trace.output_tokens.mean() < 12
    assert len(trace.prefix_names) == 2 and set(trace.prefix_tokens.tolist()) == {256}
