"""The engine process as it is started in production, with a small random model."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from support.engine.engine_clients import Client, endless
from support.engine.faulty_engine import prompt_bytes
from support.models.tiny_models import llama, prompts, save, transformers_tokens
from tidewheel.config import EngineConfig
from tidewheel.engine.launcher import engine_command
from tidewheel.engine.messages import AddRequest
from tidewheel.errors import ConfigError
from tidewheel.sampling import SamplingParams


def config_of(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig.from_settings({"model": str(folder), "dtype": "float32", "num_blocks": 64, **settings})


def test_tokens_before_and_after_a_kill(tmp_path: Path, folder: Path) -> None:
    given = prompts(4, 5, 40)
    expected = transformers_tokens(save(llama, tmp_path), given, 8)
    client = Client(folder, config=config_of(tmp_path), command=engine_command())
    try:
        client.start(120.0)
        for first_key in (0, 100):
            for key, prompt in enumerate(given, first_key):
                sampling = SamplingParams(temperature=0.0, max_tokens=8)
                client.add(AddRequest(key, prompt_bytes(*prompt.tolist()), sampling))
            keys = range(first_key, first_key + len(given))
            client.recorder.wait_ended(*keys, limit_s=120.0)
            assert [client.recorder.tokens[key] for key in keys] == expected
            if first_key == 0:
                os.kill(client.info.pid, signal.SIGKILL)
                client.add(endless(50))  # lost, or refused by the next engine: then the death was noticed
                client.recorder.wait_ended(50, limit_s=120.0)
    finally:
        client.close()


def test_a_missing_model_is_one_line(folder: Path, tmp_path: Path) -> None:
    client = Client(folder, config=config_of(tmp_path / "nothing"), command=engine_command())
    try:
        with pytest.raises(ConfigError, match=r"nothing") as error:
            client.start(120.0)
        assert "\n" not in str(error.value)
    finally:
        client.close()
