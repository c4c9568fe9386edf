"""Sessions, swaps and forks through an engine process with a small random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from support.engine.engine_clients import Client, add_request
from support.engine.faulty_engine import prompt_bytes
from support.models.tiny_models import llama, prompts, save, transformers_tokens
from tidewheel.batch import Int32Array
from tidewheel.config import EngineConfig
from tidewheel.engine.launcher import engine_command
from tidewheel.engine.messages import AddRequest
from tidewheel.sampling import SamplingParams

NUM_TOKENS = 8
LIMIT_S = 120.0


class Engine(NamedTuple):
    client: Client
    model: torch.nn.Module

    def run(self, key: int, prompt: Int32Array, **fields: object) -> list[int]:
        """Its tokens, which are those of the model when it is alone."""
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        self.client.add(add_request(key, prompt_bytes(*prompt.tolist()), sampling, **fields))
        self.client.recorder.wait_ended(key, limit_s=LIMIT_S)
        tokens = self.client.recorder.tokens[key]
        assert tokens == transformers_tokens(self.model, [prompt], NUM_TOKENS)[0]
        return tokens


@pytest.fixture
def engine(tmp_path: Path, folder: Path) -> Iterator[Engine]:
    """Its pool has 16 blocks, which is what one request of the longest context needs."""
    model = save(llama, tmp_path)
    settings = {"dtype": "float32", "num_blocks": 16, "swap_space": 0.01, "preemption_mode": "swap"}
    settings["admit_by_growth"] = False
    config = EngineConfig.from_settings({"model": str(tmp_path), **settings})
    client = Client(folder, config=config, command=engine_command())
    try:
        client.start(LIMIT_S)
        yield Engine(client, model)
    finally:
        client.close()


def test_a_session_is_resumed_from_the_pool_and_from_the_host_tier(engine: Engine) -> None:
    client, session = engine.client, {"session_id": "s", "session_ttl_s": 600.0}
    assert client.info.num_host_blocks > 16
    assert client.info.swap_seconds_per_block is not None
    first = prompts(1, 37, 37)[0]
    second = np.array([*first, *engine.run(1, first, **session), 5, 6, 7], dtype=np.int32)
    third = np.array([*second, *engine.run(2, second, **session), 5, 6, 7], dtype=np.int32)
    large = prompts(1, 240, 240)[0][::-1].copy()
    engine.run(3, large)  # takes all blocks of the pool
    engine.run(4, third, **session)

    def is_counted() -> bool:
        stats = client.recorder.stats[-1]
        return (stats.num_device_hits, stats.num_host_hits) == (44, 55)

    client.recorder.wait(is_counted, "44 tokens from the pool, then 55 from the host tier")


def test_requests_that_do_not_fit_together_are_swapped(engine: Engine) -> None:
    client, given = engine.client, prompts(4, 60, 60)
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    for key, prompt in enumerate(given):
        client.add(AddRequest(key, prompt_bytes(*prompt.tolist()), sampling))
    client.recorder.wait_ended(*range(4), limit_s=LIMIT_S)
    assert [client.recorder.tokens[key] for key in range(4)] == transformers_tokens(engine.model, given, 40)
    client.recorder.wait(lambda: client.recorder.stats[-1].num_swapped_in > 0, "blocks read back")
