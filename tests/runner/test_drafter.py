"""Drafts that a model makes change no token, and a model that drafts for itself is always right."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import tiny_models
from support.runner.step_loop import GREEDY, StepLoop, poison, request
from tidewheel.config import EngineConfig
from tidewheel.request import Request
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.sampling import SamplingParams

NUM_TOKENS = 24
DRAFTS = {"speculation": "draft_model", "num_speculative_tokens": 4}
SAMPLED = SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte-llama")
    tiny_models.save_byte_llama(folder)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape, and with other weights, over the same bytes."""
    folder = tmp_path_factory.mktemp("other-llama")
    tiny_models.save_byte_llama(folder)
    tiny_models.save(lambda: tiny_models.llama(vocab_size=256, num_hidden_layers=1, num_key_value_heads=1), folder)
    return folder


def settings(model: Path, **more: object) -> EngineConfig:
    return EngineConfig(
        model=str(model), dtype="float32", device="cpu", max_num_seqs=8, num_blocks=64, block_size=16, num_threads=1,
        **more,
    )  # fmt: skip


def drafting(model: Path, draft: Path | None = None, **more: object) -> ModelRunner:
    if draft is None:
        return ModelRunner.load(settings(model, speculation="first_layers", **more))
    return ModelRunner.load(settings(model, speculation="draft_model", draft_model=str(draft), **more))


def requests(count: int = 5, sampling: SamplingParams = GREEDY, num_tokens: int = NUM_TOKENS) -> list[Request]:
    prompts = tiny_models.prompts(count, 5, 60)
    return [request(f"r{i}", prompt % 250, num_tokens, sampling, seed=i) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return StepLoop(ModelRunner.load(settings(model))).run(requests())


def acceptance(loop: StepLoop) -> float:
    stats = loop.scheduler.stats()
    assert stats.num_draft_tokens > 0
    return stats.num_accepted_draft_tokens / stats.num_draft_tokens


def test_a_model_accepts_all_its_own_drafts(model: Path, expected: list[list[int]]) -> None:
    runner = drafting(model, model)
    poison(runner)
    loop = StepLoop(runner, **DRAFTS)
    assert loop.run(requests()) == expected
    assert acceptance(loop) == 1.0


def test_all_layers_accept_all_their_drafts(model: Path, expected: list[list[int]]) -> None:
    loop = StepLoop(drafting(model, num_draft_layers=2), **DRAFTS)
    assert loop.run(requests()) == expected
    assert acceptance(loop) == 1.0
