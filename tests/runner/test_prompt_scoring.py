"""Log-probabilities of prompts are computed some positions at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.models import tiny_models
from support.runner.look_up_engine import LOGITS, VOCABULARY, LookUp
from support.runner.step_loop import StepLoop, request
from tidewheel.config import EngineConfig
from tidewheel.models import architectures
from tidewheel.runner import sampler
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.sampler import score_prompts
from tidewheel.runner.sampling_plan import SCORED_AT_ONCE, PromptScoring
from tidewheel.runner.warm_up import StepSize, estimated_activation_bytes
from tidewheel.sampling import SamplingParams, TopLogprobs
from tidewheel_kernels import LogprobsOutput, compute_logprobs

SCORED = SamplingParams(temperature=0.0, prompt_logprobs=3)
ROWS = 8  # at once, in place of `SCORED_AT_ONCE`


@contextmanager
def scored_rows() -> Iterator[list[int]]:
    """Yield how many rows each computation of log-probabilities gets."""
    seen: list[int] = []

    def noted(logits: torch.Tensor, *arguments: Any) -> LogprobsOutput:
        seen.append(len(logits))
        return compute_logprobs(logits, *arguments)

    with mock.patch.object(sampler, "compute_logprobs", noted):
        yield seen


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1024, 1025])
def test_slices_have_the_values_of_the_whole(count: int) -> None:
    tokens = torch.randint(VOCABULARY, (2, count), generator=torch.Generator().manual_seed(count))
    none = np.zeros(0, dtype=np.int64)
    scoring = PromptScoring(none, none, np.array([2, 3], dtype=np.int32), none)
    with scored_rows() as seen:
        found = score_prompts(torch.eye(VOCABULARY)[tokens[0]], LookUp().logits_of, tokens[1], scoring)
    assert seen == [SCORED_AT_ONCE] * (count // 512) + [count % 512] * (count % 512 > 0)
    expected = compute_logprobs(LOGITS[tokens[0]], tokens[1], 3)
    torch.testing.assert_close(tuple(found), tuple(expected))


class LargestTensor(TorchDispatchMode):
    """Number of rows of the largest tensor of `width` columns that an operation returns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width
        self.num_rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (self._width,):
                self.num_rows = max(self.num_rows, len(tensor))
        return result


def scores(runner: ModelRunner, num_tokens: int) -> list[TopLogprobs]:
    first, second = tiny_models.prompts(2, num_tokens, num_tokens)
    requests = [request("scored", first, 2, SCORED), request("other", second[:20], 2)]
    StepLoop(runner).run(requests)
    return requests[0].prompt_logprobs


@pytest.mark.parametrize("num_tokens", [8, 9, 10, 18, 60])
def test_a_step_makes_no_logits_of_more_positions_at_once(
    runner: ModelRunner, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = scores(runner, num_tokens)
    monkeypatch.setattr(sampler, "SCORED_AT_ONCE", ROWS)
    with LargestTensor(tiny_models.VOCAB_SIZE) as largest, scored_rows() as seen:
        sliced = scores(runner, num_tokens)
    assert sum(seen) == num_tokens - 1
    assert largest.num_rows == max(seen) == min(ROWS, num_tokens - 1)
    assert [entry.logprob for entry in sliced] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)


def test_a_model_through_transformers_scores_as_a_native_one(
    runner: ModelRunner, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states are logits, of all positions at once: slices are copied from these."""
    expected = scores(runner, 30)
    monkeypatch.setattr(sampler, "SCORED_AT_ONCE", ROWS)
    monkeypatch.setattr(architectures, "NATIVE", {})
    other = ModelRunner.load(config)
    assert not other.info.is_native
    with scored_rows() as seen:
        found = scores(other, 30)
    assert max(seen) == ROWS
    assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in expected], abs=1e-4)


@pytest.mark.usefixtures("accelerator")
def test_the_step_whose_memory_is_measured_scores_prompts(config: EngineConfig) -> None:
    with scored_rows() as seen:
        ModelRunner.load(config)
    assert seen[0] == SCORED_AT_ONCE  # of 16 rows, each with 127 tokens to score


@pytest.mark.parametrize(("num_rows", "bytes_per_id"), [(4, 512 * 6), (307, 512 * 6), (308, 308 * 10)])
def test_the_estimate_takes_the_larger_of_sampled_and_scored_logits(num_rows: int, bytes_per_id: int) -> None:
    size, shape = StepSize(num_rows, 512), LookUp.shape
    with_logits, without = (
        estimated_activation_bytes(size, shape._replace(vocab_size=vocab_size), torch.bfloat16)
        for vocab_size in (1000, 0)
    )
    assert with_logits - without == 1000 * bytes_per_id
