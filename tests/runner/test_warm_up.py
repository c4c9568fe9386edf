"""What is compiled at load is all that a request can ever need: by triton-lang's own keys, without a GPU."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from support.models import tiny_models
from support.runner.launch_keys import LaunchKeys, recorded_keys
from support.runner.step_loop import GREEDY, StepLoop, request
from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models import linear as linear_layers
from tidewheel.models.architectures import ModelConfig, RopeConfig
from tidewheel.models.causal_lm import ModelShape, no_progress
from tidewheel.models.decoder import Decoder
from tidewheel.request import Request
from tidewheel.runner import model_runner
from tidewheel.runner.host_tier import BlockTransfers, HostBlocks
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel.runner.loading import RunnerParts
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.warm_up import warm_up, warm_up_batches
from tidewheel.sampling import SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE = 64
NUM_BLOCKS, NUM_HOST_BLOCKS = 80, 32

# Heads of queries and of keys, their size, vocabulary, most rows, context, tokens of a step: none of them round.
SHAPES = {
    "qwen3-0.6b": (8, 4, 128, 151_936, 37, 1000, 512, True),
    "llama-8b": (8, 2, 128, 4097, 20, 777, 300, False),
    "small heads": (4, 4, 64, 384, 7, 513, 100, False),
    "odd heads": (14, 2, 80, 4097, 3, 300, 33, False),
    "one row": (4, 1, 64, 384, 1, 200, 16, False),
    "tiny context": (4, 2, 64, 384, 5, 3, 8, False),
    "short context": (4, 2, 64, 384, 5, 200, 64, False),  # only rows of unlike lengths are split
    "deterministic": (16, 4, 128, 4097, 9, 300, 200, True),  # of the output product, inputs are split
}


class HostAccelerator:
    """Lets the runner do what it does for a GPU, with memory of the host."""

    device = CPU

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def event(self) -> HostAccelerator:
        return self

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def graph_pool(self) -> Any:
        raise AssertionError("nothing is captured here")


def runner(name: str) -> ModelRunner:
    num_q_heads, num_kv_heads, head_dim, vocab_size, max_num_seqs, max_model_len, budget, qk_norm = SHAPES[name]
    config = ModelConfig(
        architecture=name, vocab_size=vocab_size, hidden_size=96, intermediate_size=112, num_layers=2,
        num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rms_norm_eps=1e-6,
        max_position_embeddings=2048, rope=RopeConfig(rope_type="default", theta=1e6), qk_norm=qk_norm,
        sliding_windows=(0, 128),
    )  # fmt: skip
    model = Decoder(
        config, max_model_len=max_model_len, dtype=torch.bfloat16, device=CPU, deterministic=name == "deterministic"
    )
    layout = CacheLayout(model.shape, BLOCK_SIZE, torch.bfloat16)
    kv = KVTensors(layout, NUM_BLOCKS, CPU)
    facts = _info(model.shape, max_num_seqs, max_model_len, budget)
    cache = BlockTransfers(kv, HostBlocks(kv, NUM_HOST_BLOCKS))
    return ModelRunner(RunnerParts(model, layout, facts, CPU), cache, HostAccelerator())


def _info(shape: ModelShape, max_num_seqs: int, max_model_len: int, budget: int) -> RunnerInfo:
    return RunnerInfo(
        model="", architecture="", device="GPU", dtype="bfloat16", vocab_size=shape.vocab_size,
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
        block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, weights_bytes=0, activation_bytes=0, kv_cache_bytes=0,
        load_seconds=0.0, num_host_blocks=NUM_HOST_BLOCKS, swap_seconds_per_block=1e-4,
    )  # fmt: skip


@contextmanager
def recorded(architecture: int = 90) -> Iterator[LaunchKeys]:
    """Matrix products compute nothing: their values are no matter here, and take long."""
    from triton import knobs

    if knobs.runtime.interpret:
        pytest.skip("triton was imported for the interpreter; `make test-unit` has a process of its own")

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    with recorded_keys(architecture) as keys, mock.patch.object(linear_layers, "linear", linear):
        yield keys


def requests(loop_runner: ModelRunner, count: int, seed: int) -> list[Request]:
    """Prompts of all lengths, some of them shared; every way to sample, alone and mixed."""
    info, chance = loop_runner.info, np.random.default_rng(seed)
    shared = chance.integers(0, info.vocab_size, info.max_model_len, dtype=np.int32)
    result = []
    for i in range(count):
        longest = info.max_model_len - 1
        length = int(
            chance.choice((1, 2, 15, 16, 17, 64, 100, 128, 129, 255, longest, chance.integers(1, longest + 1)))
        )
        length = min(length, longest)
        prompt = chance.integers(0, info.vocab_size, length, dtype=np.int32)
        if chance.random() < 0.4:
            prompt = shared[:length].copy()
        num_tokens = int(chance.integers(1, min(40, info.max_model_len - length) + 1))
        words = ((1, 2), (3,)) if chance.random() < 0.2 else ()
        result.append(request(f"{seed}.{i}", prompt, num_tokens, _sampling(chance), seed=i, bad_words_ids=words))
    return result


def _sampling(chance: np.random.Generator) -> SamplingParams:
    if chance.random() < 0.3:
        return GREEDY
    options: dict[str, Any] = {"temperature": float(chance.choice((0.0, 0.7, 1.0)))}
    num_logprobs = int(chance.choice((0, 1, 2, 5, 8, 20)))
    for name, value in {
        "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5,
        "frequency_penalty": 0.1, "logit_bias": {3: 1.0, 5: -2.0}, "logprobs": num_logprobs,
    }.items():  # fmt: skip
        if chance.random() < 0.2:
            options[name] = value
    return SamplingParams(**options)


def serve(loop_runner: ModelRunner, *, seeds: Sequence[int], **settings: Any) -> None:
    """Waves of requests, of few and of many, through the real scheduler."""
    for seed in seeds:
        budget = loop_runner.info.max_num_batched_tokens
        loop = StepLoop(
            loop_runner, token_budget=budget, num_host_blocks=loop_runner.info.num_host_blocks, **settings
        )
        for count in (1, 2, 2 * loop_runner.info.max_num_seqs):
            loop.run(requests(loop_runner, count, seed))


@pytest.mark.parametrize("name", SHAPES)
def test_no_request_makes_a_kernel_compile(name: str) -> None:
    with recorded() as keys:
        served = runner(name)
        warm_up(served.info, served.run, no_progress)
        warmed = keys.all
        serve(served, seeds=(1,), max_inflight_steps=2)
        serve(served, seeds=(2,), preemption_mode="swap")
    assert "sample" in str(warmed), "no kernel was recorded"
    assert not keys.all - warmed, "\n".join(f"{key} {keys.first[key]}" for key in sorted(keys.all - warmed))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("name", SHAPES)
def test_no_request_of_a_long_run_makes_a_kernel_compile(name: str, architecture: int) -> None:
    with recorded(architecture) as keys:
        served = runner(name)
        warm_up(served.info, served.run, no_progress)
        warmed = keys.all
        serve(served, seeds=range(10, 14), max_inflight_steps=2)
        serve(
            served, seeds=range(20, 22), preemption_mode="swap", num_blocks=max(20, -(-SHAPES[name][5] // BLOCK_SIZE))
        )
    assert not keys.all - warmed, "\n".join(f"{key} {keys.first[key]}" for key in sorted(keys.all - warmed))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_is_compiled_after_the_load_on_a_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By triton-lang's own word, graphs and all."""
    tiny_models.save(lambda: tiny_models.qwen3(head_dim=64, hidden_size=128), tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cuda", load_format="dummy", max_num_seqs=20, max_num_batched_tokens=300,
        num_blocks=NUM_BLOCKS, swap_space=0.05,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        served = ModelRunner.load(config)
        serve(served, seeds=range(3), max_inflight_steps=2)
        serve(served, seeds=range(3, 6), preemption_mode="swap")
    assert re.search(r"kernels: \d+ compiled, \d+ loaded", caplog.text)
    assert "while requests waited" not in caplog.text


def test_a_violation_is_found() -> None:
    """Without the steps that sample, serving would compile."""
    with recorded() as keys:
        served = runner("llama-8b")
        for batch in warm_up_batches(served.info):
            if all(new.sampling == GREEDY for new in batch.new_rows):
                served.run(batch)
        warmed = keys.all
        serve(served, seeds=(1,))
    assert any("sample" in key for key in keys.all - warmed)


def test_an_argument_that_changes_and_is_specialised_on_is_found() -> None:
    """As if the number of decodes before the first prompt were like any other integer to the compiler."""
    from tidewheel_kernels.attention.triton_kernels import prefill_attention_kernel

    parameter = next(p for p in prefill_attention_kernel.params if p.name == "first_seq")
    assert parameter.do_not_specialize
    with mock.patch.object(parameter, "do_not_specialize", False), recorded() as keys:
        served = runner("llama-8b")
        warm_up(served.info, served.run, no_progress)
        warmed = keys.all
        serve(served, seeds=(1,))
    assert any("prefill" in key for key in keys.all - warmed)


def test_steps_are_ones_that_the_scheduler_could_make() -> None:
    for num_q_heads, num_kv_heads, head_dim, vocab_size, max_num_seqs, max_model_len, budget, _ in SHAPES.values():
        shape = ModelShape(2, num_kv_heads, head_dim, vocab_size, num_q_heads * head_dim, 112)
        info = _info(shape, max_num_seqs, max_model_len, budget)
        for batch in warm_up_batches(info):
            lengths = batch.start_positions + batch.num_scheduled_tokens
            assert len(batch.rows) <= max_num_seqs
            assert batch.num_tokens == batch.num_scheduled_tokens.sum() <= budget
            assert lengths.max() <= max_model_len
            assert batch.block_ids.max() < NUM_BLOCKS
            assert (batch.num_scheduled_tokens[: batch.num_decodes] == 1).all()


class Full:
    """A runner on a GPU without memory for the second step."""

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info
        self.steps: list[int] = []

    def run(self, batch: ScheduledBatch) -> SampledTokens:
        self.steps.append(batch.num_tokens)
        if len(self.steps) == 2:
            raise torch.OutOfMemoryError
        return SampledTokens(batch.step_id, batch.rows)


def test_too_little_memory_beside_the_cache_is_said() -> None:
    full = Full(_info(ModelShape(2, 2, 64, 384, 96, 112), 4, 100, 66))
    with pytest.raises(ConfigError) as caught:
        warm_up(full.info, full.run, no_progress)
    assert full.steps[0] == 64, "the largest step comes first"
    assert str(caught.value) == (
        f"the GPU has no room for a step of {full.steps[1]} tokens beside weights and cache: lower "
        "gpu_memory_utilization, kv_cache_memory_mb, num_blocks or max_num_batched_tokens"
    )


def test_a_load_warms_up_once_the_cache_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a GPU, with the operations of the CPU."""
    monkeypatch.setattr(model_runner, "accelerator_of", lambda device: HostAccelerator())
    monkeypatch.setattr(model_runner, "measured_activation_bytes", lambda run, size, *_: (run(size), 1))
    monkeypatch.setattr(model_runner, "estimated_graph_bytes", lambda taken, count: 0)
    tiny_models.save(tiny_models.llama, tmp_path)
    stages: dict[str, float] = {}
    config = EngineConfig(
        model=str(tmp_path), dtype="float32", device="cpu", max_num_seqs=2, max_num_batched_tokens=8,
        max_model_len=20, num_blocks=8, enforce_eager=True,
    )  # fmt: skip
    loaded = ModelRunner.load(config, lambda stage, fraction: stages.update({stage: fraction}))
    assert stages == {"weights": 1.0, "profile": 1.0, "kernels": 1.0}
    assert list(stages) == ["weights", "profile", "kernels"]
    assert list(loaded.info.stage_seconds) == ["start", *stages]
    assert loaded.info.load_seconds == pytest.approx(sum(loaded.info.stage_seconds.values()))


def test_progress_goes_to_its_end() -> None:
    seen: list[float] = []
    with recorded():
        served = runner("one row")
        warm_up(served.info, served.run, lambda stage, fraction: seen.append(fraction))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0.0, 1.0)
