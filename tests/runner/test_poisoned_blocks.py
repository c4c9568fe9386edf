"""NaN in every slot without content, between all steps: a read past the end of a sequence shows in the tokens.

The triton-lang kernels are held to the same by `tests/kernels/test_attention.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from support.models import tiny_models
from support.runner.step_loop import StepLoop, request
from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.request import Request
from tidewheel.runner.model_runner import ModelRunner
from tidewheel_kernels.attention import _OP

NUM_TOKENS = 12


class PoisoningRunner:
    """Keeps what rows have computed, cached and kept blocks, and sources of copies; the rest becomes NaN."""

    def __init__(self, runner: ModelRunner) -> None:
        self.info = runner.info
        self.loop: StepLoop | None = None
        self.num_poisoned = 0
        self._runner = runner

    def run(self, batch: ScheduledBatch) -> SampledTokens:
        empty = ~self._content(batch)
        self.num_poisoned += int(empty.sum())
        for layer in self._runner.kv.layers:
            for cache in layer[:2]:
                cache.view(-1, *cache.shape[2:])[empty] = float("nan")
        return self._runner.run(batch)

    def _content(self, batch: ScheduledBatch) -> torch.Tensor:
        assert self.loop is not None
        state = self.loop.scheduler._state
        pool = state.kv._pool
        content = torch.zeros(self.info.num_blocks, self.info.block_size, dtype=torch.bool)
        known = [b for b in range(pool.num_blocks) if pool.hash_of(b) is not None or pool._keepers.get(b, 0)]
        content[[*known, *batch.transfers.copy_sources.tolist()]] = True
        size = self.info.block_size
        for row, table in state.kv._tables.items():
            positions = np.arange(state.columns.num_computed_tokens[row])
            content[np.array(table)[positions // size], positions % size] = True
        return content.flatten()


def requests() -> list[Request]:
    """Shared prefixes, lengths around a block's, a fork and two turns of a session."""
    shared = tiny_models.prompts(1, 40, 40)[0]
    prompts = [*tiny_models.prompts(5, 1, 70), shared, np.concatenate((shared[:33], shared[:5])), shared[:32]]
    made = [request(str(i), prompt, NUM_TOKENS, session_id="s", session_ttl=60.0) for i, prompt in enumerate(prompts)]
    return [*made, request("follower", shared, NUM_TOKENS, leader=made[5])]


@pytest.mark.parametrize("model", [tiny_models.llama, tiny_models.gemma2], ids=lambda model: model.__name__)
@pytest.mark.parametrize("attention", ["native", "cpu", "reference"])
def test_nothing_past_the_end_of_a_sequence_changes_a_token(
    config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    model: Callable[[], PreTrainedModel],
) -> None:
    tiny_models.save(model, tmp_path)
    monkeypatch.setattr(_OP, "chosen", {(torch.device("cpu"), torch.float32): _OP.implementation(attention)})
    runner = ModelRunner.load(dataclasses.replace(config, model=str(tmp_path)))
    expected = [StepLoop(runner, prefix_caching=False).run([r])[0] for r in requests() if r.leader is None]
    poisoning = PoisoningRunner(runner)
    loop = poisoning.loop = StepLoop(poisoning, num_blocks=16, token_budget=24)  # type: ignore[arg-type]
    assert loop.run(requests()) == [*expected, expected[5]]
    assert loop.run(requests()) == [*expected, expected[5]], "with what is cached"
    stats = loop.scheduler.stats()
    assert stats.num_preemptions and stats.num_device_hits and poisoning.num_poisoned
