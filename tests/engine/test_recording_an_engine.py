"""An engine that records: its decisions are replayed to the same, its steps calibrate a cost model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.models.tiny_models import llama, save
from tidewheel import LLM, SamplingParams
from tidewheel.cli.main import main
from tidewheel.config import EngineConfig
from tidewheel.engine.build import check_record_folder
from tidewheel.errors import ConfigError
from tidewheel.simulate.calibration import facts_of, fit, measured_steps
from tidewheel.simulate.replay import Recording, engine_of, replay, scheduler_of


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of prompts that share prefixes, in a cache so small that some are preempted."""
    folder, target = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("recordings")
    save(llama, folder)
    rng = np.random.default_rng(0)
    prompts = [{"input_ids": [7] * 20 + rng.integers(3, 40, 12).tolist()} for _ in range(12)]
    sampling = SamplingParams(max_tokens=40, seed=1)
    settings = {"dtype": "float32", "num_blocks": 12, "block_size": 16, "num_threads": 1, "max_model_len": 128}
    with LLM(folder, skip_tokenizer_init=True, record=str(target), **settings) as llm:
        for _ in range(2):
            llm.generate(prompts, sampling, use_tqdm=False)
        assert llm.stats().num_preemptions > 0 and llm.stats().num_prefix_hits > 0
    (path,) = target.glob("*.jsonl")
    return path


def test_every_decision_of_the_engine_is_replayed(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replayed = replay(Recording(recording), scheduler_of(Recording(recording).header))
    assert replayed.difference == "" and replayed.num_steps > 60 and replayed.num_requests >= 24
    assert main(["simulate", "--replay", str(recording)]) == 0
    assert "every decision is the same" in capsys.readouterr().out


def test_its_steps_calibrate_a_cost_model(recording: Path) -> None:
    """Durations are made up: measured ones may fit badly on a busy machine."""
    _, info = engine_of(Recording(recording).header)
    steps = measured_steps(Recording(recording).events())
    seconds = [1e-3 + 1e-4 * step.features.num_tokens for step in steps]
    made_up = [step._replace(seconds=of_step) for step, of_step in zip(steps, seconds, strict=True)]
    model = fit(made_up, "made up", **facts_of(info))
    assert model.fit["num_steps"] == len(steps) > 60
    assert model.kv_bytes_per_token > 0 and model.block_size == 16 and model.num_blocks == 12
    assert [model.step_seconds(step.features) for step in steps] == pytest.approx(seconds)
    assert {step.turn_seconds is not None and step.turn_seconds > 0 for step in steps} == {True, False}


def test_nobody_else_may_read_it(recording: Path) -> None:
    assert recording.stat().st_mode & 0o077 == 0


def test_a_folder_that_is_not_there_stops_the_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record is .*: there is no folder"):
        check_record_folder(EngineConfig(model="m", record=str(tmp_path / "absent")))


def test_serve_records_what_it_serves_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    monkeypatch.setattr("tidewheel.server.run_server.serve", lambda options: started.append(options) or 0)
    model = str(tmp_path)
    (tmp_path / "file").touch()
    assert main(["serve", "--model", model, "--record", str(tmp_path)]) == 0
    assert started[0].settings["record"] == str(tmp_path.resolve())
    for arguments, says in (
        (["--model-repository", model, "--record", model], "--record goes with --model"),
        (["--model", model, "--record", f"{model}/file/absent"], "cannot be made a folder"),
        (["--model", model, "--record", model, "--set", "record=x"], "give one"),
    ):
        assert main(["serve", *arguments]) == 2
        assert says in capsys.readouterr().err
