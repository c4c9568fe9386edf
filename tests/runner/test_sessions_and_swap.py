"""Sessions, swaps and forks with a real model: the tokens are those of a request that was alone, and only what is new
is computed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from support.models import tiny_models
from support.runner.step_loop import StepLoop, poison, request
from tidewheel.batch import Int32Array
from tidewheel.config import EngineConfig
from tidewheel.request import Request
from tidewheel.runner.model_runner import ModelRunner

NUM_TOKENS = 24


@pytest.fixture(params=["auto", "fp8_e4m3", "int8"])
def runner(config: EngineConfig, request: pytest.FixtureRequest) -> ModelRunner:
    runner = ModelRunner.load(dataclasses.replace(config, swap_space=0.01, kv_cache_dtype=request.param))
    poison(runner)
    return runner


def alone(runner: ModelRunner, prompt: Int32Array, num_tokens: int = NUM_TOKENS) -> list[int]:
    return StepLoop(runner, prefix_caching=False).run([request("alone", prompt, num_tokens)])[0]


def next_prompt(done: Request, *tokens: int) -> Int32Array:
    return np.concatenate((done.prompt_token_ids, np.array([*done.output_token_ids, *tokens], dtype=np.int32)))


def num_scheduled(loop: StepLoop) -> int:
    return loop.scheduler.stats().num_scheduled_tokens


def test_requests_preempted_by_swap_come_to_the_same_tokens(runner: ModelRunner) -> None:
    """Three requests of two blocks each, which grow to four, in a pool of eight."""
    prompts = tiny_models.prompts(3, 32, 32)
    expected = [alone(runner, prompt) for prompt in prompts]
    tokens, computed = {}, {}
    for mode in ("swap", "recompute"):
        poison(runner)
        loop = StepLoop(runner, num_blocks=8, num_host_blocks=16, preemption_mode=mode)
        tokens[mode] = loop.run([request(f"r{i}", prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)])
        computed[mode] = num_scheduled(loop)
        stats = loop.scheduler.stats()
        assert stats.num_preemptions > 0
        assert (stats.num_swap_preemptions > 0) == (mode == "swap")
        assert (stats.num_swapped_out > 0) == (stats.num_swapped_in > 0) == (mode == "swap")
    assert tokens == {"swap": expected, "recompute": expected}
    assert computed["swap"] <= computed["recompute"]


def test_the_next_turn_of_a_session_computes_its_new_tokens_alone(runner: ModelRunner) -> None:
    first = request("one", tiny_models.prompts(1, 37, 37)[0], 8, session_id="s", session_ttl=60.0)
    loop = StepLoop(runner, num_blocks=16)
    loop.run([first])
    before = num_scheduled(loop)
    second = request("two", next_prompt(first, 5, 6, 7), 8, session_id="s", session_ttl=60.0)
    tokens = loop.run([second])[0]
    assert second.num_cached_tokens == 44  # all but the token that was sampled last, in two blocks and a part
    assert num_scheduled(loop) - before == 1 + 3 + 7
    assert tokens == alone(runner, second.prompt_token_ids, 8)


def test_a_session_in_the_host_tier_is_resumed_as_well(runner: ModelRunner) -> None:
    first = request("one", tiny_models.prompts(1, 37, 37)[0], 8, session_id="s", session_ttl=60.0)
    loop = StepLoop(runner, num_blocks=8, num_host_blocks=8)
    loop.run([first])
    other = tiny_models.prompts(1, 120, 120)[0][::-1].copy()
    loop.run([request("large", other, 8)])  # takes all blocks of the pool
    stats = loop.scheduler.stats()
    assert (stats.num_sessions, stats.num_session_blocks, stats.num_swapped_out) == (1, 0, 3)
    before = stats.num_scheduled_tokens
    second = request("two", next_prompt(first, 5, 6, 7), 8, session_id="s", session_ttl=60.0)
    tokens = loop.run([second])[0]
    assert (second.num_cached_tokens, loop.scheduler.stats().num_swapped_in) == (44, 3)
    assert num_scheduled(loop) - before == 1 + 3 + 7
    assert tokens == alone(runner, second.prompt_token_ids, 8)


def test_two_requests_that_resume_one_session_do_not_disturb_each_other(runner: ModelRunner) -> None:
    first = request("one", tiny_models.prompts(1, 20, 20)[0], 4, session_id="s", session_ttl=60.0)
    loop = StepLoop(runner)
    loop.run([first])
    both = [
        request(f"branch{token}", next_prompt(first, token), 12, session_id="s", session_ttl=60.0) for token in (3, 9)
    ]
    tokens = loop.run(both)
    assert tokens == [alone(runner, branch.prompt_token_ids, 12) for branch in both]
    assert [branch.num_cached_tokens for branch in both] == [23, 23]


@pytest.mark.parametrize("num_prompt_tokens", [33, 40])
def test_sequences_of_one_prompt_compute_it_once(runner: ModelRunner, num_prompt_tokens: int) -> None:
    prompt = tiny_models.prompts(1, num_prompt_tokens, num_prompt_tokens)[0]
    loop = StepLoop(runner)
    leader = request("n0", prompt, 8)
    others = [request(f"n{i}", prompt, 8, leader=leader) for i in (1, 2)]
    expected = alone(runner, prompt, 8)
    assert loop.run([leader, *others]) == [expected] * 3
    assert [other.num_cached_tokens for other in others] == [num_prompt_tokens - 1] * 2
    assert num_scheduled(loop) == num_prompt_tokens + 2 + 3 * 7
