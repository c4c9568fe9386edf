"""Greedy tokens equal those of transformers, in float32, token for token, however the work is cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from support.models import tiny_models
from support.runner.step_loop import StepLoop, poison, request
from tidewheel.batch import Int32Array
from tidewheel.config import EngineConfig
from tidewheel.runner.model_runner import ModelRunner

NUM_REQUESTS = 32
NUM_TOKENS = 8
BLOCK_SIZE = 16

THROUGH_TRANSFORMERS: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma2": tiny_models.gemma2,
    "gemma3": tiny_models.gemma3,
    "gpt2": tiny_models.gpt2,
    "opt": tiny_models.opt,
    "stablelm": tiny_models.stablelm,
}
MORE_THROUGH_TRANSFORMERS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt-neox": tiny_models.gpt_neox,
    "granite": tiny_models.granite,
    "phi3-window": tiny_models.phi3,
}
MODELS = {**tiny_models.NATIVE, **THROUGH_TRANSFORMERS, **MORE_THROUGH_TRANSFORMERS}


class Case(NamedTuple):
    runner: ModelRunner
    prompts: list[Int32Array]
    expected: list[list[int]]


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MORE_THROUGH_TRANSFORMERS]


@pytest.fixture(scope="module", params=[*tiny_models.NATIVE, *THROUGH_TRANSFORMERS, *SLOW])
def model_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=DEVICES)
def case(request: pytest.FixtureRequest, model_name: str, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp(model_name)
    model = tiny_models.save(MODELS[model_name], folder)
    candidates = tiny_models.prompts(NUM_REQUESTS + 8, 1, 60)
    prompts, expected = tiny_models.clear_prompts(model, candidates, NUM_REQUESTS, NUM_TOKENS)
    config = EngineConfig(
        model=str(folder), dtype="float32", device=request.param, max_num_seqs=NUM_REQUESTS, num_blocks=256,
        block_size=BLOCK_SIZE, num_threads=1,
    )  # fmt: skip
    return Case(ModelRunner.load(config), prompts, expected)


def generated(case: Case, prompts: list[Int32Array], **options: object) -> list[list[int]]:
    """On a cache that is NaN wherever this run has not written."""
    poison(case.runner)
    loop = StepLoop(case.runner, **options)
    return loop.run([request(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)])


def test_alone(case: Case) -> None:
    for i in (0, 1, 2):
        assert generated(case, [case.prompts[i]]) == [case.expected[i]]


def test_in_a_batch(case: Case) -> None:
    assert generated(case, case.prompts) == case.expected


def test_with_chunked_prefill(case: Case) -> None:
    assert generated(case, case.prompts, token_budget=53) == case.expected


def test_with_preemption(case: Case) -> None:
    poison(case.runner)
    loop = StepLoop(case.runner, num_blocks=20, prefix_caching=False)
    requests = [request(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(case.prompts)]
    assert loop.run(requests) == case.expected
    assert loop.scheduler.stats().num_preemptions > 0


def test_with_prefix_hits(case: Case) -> None:
    poison(case.runner)
    loop = StepLoop(case.runner, prefix_caching=True)
    first = loop.run([request(f"first {i}", prompt, NUM_TOKENS) for i, prompt in enumerate(case.prompts)])
    again = loop.run([request(f"again {i}", prompt, NUM_TOKENS) for i, prompt in enumerate(case.prompts)])
    assert first == case.expected
    assert again == case.expected
    assert loop.scheduler.stats().num_prefix_hits > 0
