"""Sampling of single requests inside batches, against what the parameters are defined to do."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from msgspec.structs import force_setattr, replace
from transformers import LlamaForCausalLM, PreTrainedModel

from support.models import tiny_models
from support.runner.step_loop import GREEDY, StepLoop, request
from tidewheel.batch import Int32Array, SampledTokens
from tidewheel.config import EngineConfig
from tidewheel.engine.core import EngineCore
from tidewheel.models.causal_lm import no_progress
from tidewheel.request import FinishReason, Request
from tidewheel.runner.host_tier import BlockTransfers
from tidewheel.runner.loading import load_parts
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.sampling import SamplingParams, TopLogprobs

NUM_TOKENS = 12
PROMPT = tiny_models.prompts(1, 12, 12, seed=5)[0]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedModel:
    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def raw_logits(reference: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([token_ids])).logits[0, -1]


def assert_clear(logits: torch.Tensor, count: int = 1) -> None:
    """Check that rounding cannot change the order of the `count` best."""
    best = logits.topk(count + 1).values
    assert (best[:-1] - best[1:]).min() > tiny_models.MARGIN, "choose another seed"


def answer(runner: ModelRunner, sampling: SamplingParams, prompt: Int32Array = PROMPT, **fields: object) -> list[int]:
    return StepLoop(runner).run([request("r", prompt, NUM_TOKENS, sampling, **fields)])[0]


def among_others(runner: ModelRunner, subject: Request, count: int) -> list[int]:
    """The tokens of `subject`, in a batch with `count` other requests of all kinds."""
    kinds = [
        GREEDY,
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=0.7, top_p=0.8, min_p=0.05, logprobs=3),
        SamplingParams(repetition_penalty=1.4, logit_bias={3: 5.0}),
    ]
    prompts = tiny_models.prompts(count, 1, 40, seed=9)
    others = [request(f"o{i}", p, NUM_TOKENS, kinds[i % 4], seed=i) for i, p in enumerate(prompts)]
    return StepLoop(runner, token_budget=48).run([*others[: count // 2], subject, *others[count // 2 :]])[count // 2]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.9),
        SamplingParams(temperature=0.8, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3),
        SamplingParams(temperature=0.0, presence_penalty=1.5, repetition_penalty=1.3),
    ],
    ids=["temperature", "truncated", "penalised", "greedy-penalised"],
)
def test_a_request_is_sampled_alike_in_any_batch(runner: ModelRunner, sampling: SamplingParams) -> None:
    alone = answer(runner, sampling, seed=77)
    assert among_others(runner, request("r", PROMPT, NUM_TOKENS, sampling, seed=77), 9) == alone


def test_the_seed_decides_the_draw(runner: ModelRunner) -> None:
    hot = SamplingParams(temperature=2.0)
    assert answer(runner, hot, seed=1) == answer(runner, hot, seed=1)
    assert answer(runner, hot, seed=1) != answer(runner, hot, seed=2)


def test_draws_follow_the_distribution(runner: ModelRunner, reference: PreTrainedModel) -> None:
    logits = raw_logits(reference, PROMPT.tolist())
    expected = torch.softmax(logits / 0.5, -1)
    loop, cold = StepLoop(runner), SamplingParams(temperature=0.5)
    drawn = Counter(tokens[0] for tokens in loop.run([request(f"r{i}", PROMPT, 1, cold, seed=i) for i in range(400)]))
    for token in expected.topk(3).indices.tolist():
        p = float(expected[token])
        assert abs(drawn[token] / 400 - p) < 4 * math.sqrt(p * (1 - p) / 400)


def test_top_k_of_one_is_greedy(runner: ModelRunner) -> None:
    assert answer(runner, SamplingParams(temperature=5.0, top_k=1), seed=3) == answer(runner, GREEDY)


def test_a_large_bias_forces_a_token(runner: ModelRunner) -> None:
    assert answer(runner, SamplingParams(temperature=0.0, logit_bias={42: 100.0})) == [42] * NUM_TOKENS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_tokens_than_the_allowed_never_come(runner: ModelRunner, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, allowed_token_ids=(5, 9, 42), logit_bias={9: -100.0})
    tokens = answer(runner, sampling)
    assert set(tokens) <= {5, 42}
    assert len(tokens) == NUM_TOKENS


def test_stop_tokens_are_masked_until_min_tokens(runner: ModelRunner) -> None:
    plain = answer(runner, GREEDY)
    stop = plain[2]
    ended = answer(runner, GREEDY, stop_token_ids=(stop,))
    assert ended == plain[: plain.index(stop) + 1]
    longer = answer(runner, SamplingParams(temperature=0.0, min_tokens=8), stop_token_ids=(stop,))
    assert len(longer) >= 8
    assert stop not in longer[:8]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_bad_words_are_never_completed(runner: ModelRunner, length: int) -> None:
    plain = answer(runner, GREEDY)
    word = tuple(plain[4 : 4 + length])
    changed = answer(runner, GREEDY, bad_words_ids=(word,))
    assert changed[: 3 + length] == plain[: 3 + length] if length > 1 else word[0] not in changed
    assert all(tuple(changed[i : i + length]) != word for i in range(len(changed)))


def test_a_bad_word_may_begin_in_the_prompt(runner: ModelRunner) -> None:
    first = answer(runner, GREEDY)[0]
    assert answer(runner, GREEDY, bad_words_ids=((int(PROMPT[-1]), first),))[0] != first


def test_penalties_equal_their_definition(runner: ModelRunner, reference: PreTrainedModel) -> None:
    sampling = SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=1.5, logit_bias={7: 9.0}
    )
    tokens = PROMPT.tolist()
    for _ in range(NUM_TOKENS):
        logits = raw_logits(reference, tokens).clone()
        logits[7] += 9.0
        output = Counter(tokens[len(PROMPT) :])
        for token in set(tokens):
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
            logits[token] -= 1.5 * output[token] + 0.4 * (output[token] > 0)
        assert_clear(logits)
        tokens.append(int(logits.argmax()))
    expected = tokens[len(PROMPT) :]
    assert max(Counter(expected).values()) > 2, "the case must repeat a token for its count to matter"
    assert answer(runner, sampling) == expected


def test_penalties_survive_a_preemption(runner: ModelRunner) -> None:
    sampling = SamplingParams(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.5)
    bad = ((1, 2), (3,))
    prompts = tiny_models.prompts(6, 20, 40, seed=2)

    def run(num_blocks: int) -> tuple[list[list[int]], int]:
        loop = StepLoop(runner, num_blocks=num_blocks, prefix_caching=False)
        requests = [request(f"{i}", p, 30, sampling, seed=i, bad_words_ids=bad) for i, p in enumerate(prompts)]
        return loop.run(requests), loop.scheduler.stats().num_preemptions

    roomy, none = run(64)
    tight, some = run(9)
    assert (none, some > 0) == (0, True)
    assert tight == roomy


def first_step(runner: ModelRunner, requests: list[Request]) -> SampledTokens:
    loop = StepLoop(runner)
    for item in requests:
        loop.scheduler.add_group([item], 0.0)
    batch = loop.scheduler.schedule(0.0)
    assert batch is not None
    return runner.run(batch)


def test_logprobs_are_those_of_the_model(runner: ModelRunner, reference: PreTrainedModel) -> None:
    prompts = tiny_models.prompts(3, 5, 20, seed=3)
    forced = SamplingParams(temperature=0.0, logit_bias={9: 100.0}, logprobs=2)
    requests = [
        request("plain", prompts[0], 4),
        request("forced", prompts[1], 4, forced),
        request("sampled", prompts[2], 4, SamplingParams(temperature=1.7, logprobs=5), seed=1),
    ]
    sampled = first_step(runner, requests)
    assert sampled.logprobs is not None
    assert sampled.token_ids[1] == 9
    assert set(sampled.logprobs) == {1, 2}
    for i, count in ((1, 2), (2, 5)):
        expected = torch.log_softmax(raw_logits(reference, prompts[i].tolist()), -1)
        assert_clear(expected, count)
        token, top = int(sampled.token_ids[i]), sampled.logprobs[i]
        assert isinstance(top, TopLogprobs)
        assert top.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        assert top.rank == int((expected >= expected[token]).sum())
        assert top.top_ids == tuple(expected.topk(count).indices.tolist())
        assert top.top_logprobs == pytest.approx(expected.topk(count).values.tolist(), abs=1e-4)


def test_no_logprobs_without_being_asked(runner: ModelRunner) -> None:
    assert first_step(runner, [request("r", PROMPT, 2)]).logprobs is None


def test_logits_that_are_not_finite_end_one_request_only(config: EngineConfig, runner: ModelRunner) -> None:
    poisoned = 11
    parts = load_parts(config, no_progress)
    parts.model.embedding.weight[poisoned] = float("nan")
    runner = ModelRunner(parts._replace(info=runner.info), BlockTransfers(runner.kv))
    prompts = [np.array([1, 2, 3], dtype=np.int32), np.array([4, poisoned, 6], dtype=np.int32)]
    asked = replace(GREEDY, logprobs=1)
    sampled = first_step(runner, [request(f"{i}", prompt, 3, asked) for i, prompt in enumerate(prompts)])
    assert sampled.token_ids[0] >= 0
    assert sampled.token_ids[1] == SampledTokens.NOT_FINITE
    assert sampled.logprobs is not None
    assert set(sampled.logprobs) == {0}


class BrokenBias(dict[int, float]):
    """Passes for a bias until it is read. No request has one: they are checked before."""

    def __bool__(self) -> bool:
        return True

    def keys(self) -> NoReturn:  # type: ignore[override]
        raise ValueError("a broken bias")


def test_parameters_that_fail_end_their_request_alone(runner: ModelRunner) -> None:
    prompts = tiny_models.prompts(3, 5, 40)
    expected = [answer(runner, GREEDY, prompt) for prompt in prompts]
    requests = [request(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)]
    broken = request("broken", PROMPT, NUM_TOKENS, SamplingParams(temperature=0.0, logit_bias={3: 1.0}))
    force_setattr(broken.sampling, "logit_bias", BrokenBias())
    core = EngineCore(StepLoop(runner).scheduler, runner, lambda outputs: None)
    for one in (requests[0], broken, *requests[1:]):
        core.add_group([one])
    while core.has_unfinished:
        core.step()
    assert [one.output_token_ids for one in requests] == expected
    assert broken.finish_reason is FinishReason.ERROR and not broken.output_token_ids
