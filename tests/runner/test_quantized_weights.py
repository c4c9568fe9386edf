"""Weights of 8 and 4 bits, made at load: less memory, and logits close to those of the files' weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from support.models import tiny_models
from support.runner.decode_workloads import workload
from support.runner.graph_logits import decode_differences
from support.runner.graphed_runner import graphed_tokens, with_model
from support.runner.step_loop import StepLoop
from tidewheel.config import CacheDType, EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import ForwardInput
from tidewheel.models.decoder import Decoder
from tidewheel.models.trial_prompt import TOLERANCE, one_sequence, random_tokens
from tidewheel.request import Request
from tidewheel.runner.kv_tensors import KVTensors
from tidewheel.runner.loading import RunnerParts, load_parts
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.sampling import SamplingParams
from tidewheel_kernels import FP8

CPU = torch.device("cpu")
NUM_TOKENS = 60


def parts_of(folder: Path, **settings: object) -> RunnerParts:
    given = {"model": str(folder), "dtype": "float32", "device": "cpu", "num_threads": 1, **settings}
    return load_parts(EngineConfig.from_settings(given), lambda stage, fraction: None)


def logits_of(parts: RunnerParts) -> torch.Tensor:
    kv = KVTensors(parts.layout, 4, CPU)
    tokens, positions = random_tokens(NUM_TOKENS, tiny_models.VOCAB_SIZE, CPU), torch.arange(NUM_TOKENS)
    with torch.inference_mode():
        return parts.model.forward(
            ForwardInput(tokens, positions, one_sequence(NUM_TOKENS, 16, CPU), kv.layers, positions)
        )


@pytest.mark.parametrize("make", [tiny_models.llama, tiny_models.qwen2, tiny_models.qwen3])
@pytest.mark.parametrize(
    ("quantization", "error", "share"), [("fp8", 0.2, 0.7), ("int8", 0.05, 0.35), ("int4", 0.4, 0.3)]
)
def test_logits_are_close_and_weights_smaller(
    tmp_path: Path, make: Callable[..., PreTrainedModel], quantization: str, error: float, share: float
) -> None:
    tiny_models.save(lambda: make(intermediate_size=128), tmp_path)
    exact, rounded = parts_of(tmp_path), parts_of(tmp_path, quantization=quantization)
    difference = logits_of(rounded) - logits_of(exact)
    assert 0 < (difference.square().mean() / logits_of(exact).square().mean()).sqrt() < error
    assert rounded.model.weights_bytes < share * exact.model.weights_bytes
    assert rounded.info.weights_bytes == rounded.model.weights_bytes


def test_fp8_leaves_the_output_matrix(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.llama, tmp_path)
    model = parts_of(tmp_path, quantization="fp8").model
    assert isinstance(model, Decoder)
    assert {layer.weight.dtype for layer in model.to_fill} == {FP8}
    assert model.lm_head not in model.to_fill


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_random_weights_are_rounded_too(tmp_path: Path, quantization: str) -> None:
    tiny_models.save(lambda: tiny_models.llama(tie_word_embeddings=True, intermediate_size=128), tmp_path)
    logits = logits_of(parts_of(tmp_path, quantization=quantization, load_format="dummy"))
    assert logits.isfinite().all()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_together_with_any_cache(checkpoint: Path, kv_cache_dtype: CacheDType) -> None:
    runner = ModelRunner.load(dataclasses.replace(fp8_config(checkpoint), kv_cache_dtype=kv_cache_dtype))
    tokens = StepLoop(runner).run(to_their_limits())
    assert [len(of_one) for of_one in tokens] == [item.max_tokens for item in to_their_limits()]


@pytest.mark.usefixtures("one_rounding")
def test_together_with_graphs(checkpoint: Path) -> None:
    """A rounding of 8 bits may turn out otherwise in a graph, so logits are compared with a tolerance."""
    plain = ModelRunner.load(fp8_config(checkpoint))
    graphed = with_model(plain, plain._steps.model)
    with decode_differences() as differences:
        tokens = graphed_tokens(graphed, to_their_limits())
    assert [len(of_one) for of_one in tokens] == [item.max_tokens for item in to_their_limits()]
    assert len(differences) >= 10
    assert all(difference <= TOLERANCE[torch.bfloat16] for difference in differences)


def fp8_config(checkpoint: Path) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint), dtype="float32", device="cpu", max_num_seqs=16, max_model_len=128, num_blocks=64,
        num_threads=1, quantization="fp8",
    )  # fmt: skip


def to_their_limits() -> list[Request]:
    return workload([SamplingParams(temperature=0.0, ignore_eos=True)], 6)


def test_a_matrix_that_has_no_such_size_is_named(tmp_path: Path) -> None:
    tiny_models.save(lambda: tiny_models.llama(intermediate_size=100), tmp_path)
    with pytest.raises(ConfigError, match=r"gate_proj.weight is in a matrix of 200 x 64, and .* multiples of 16"):
        parts_of(tmp_path, quantization="fp8")
    with pytest.raises(
        ConfigError, match=r"down_proj.weight is in a matrix of 64 x 100, and .* multiples of 32 columns"
    ):
        parts_of(tmp_path, quantization="int4")


def test_models_that_run_through_transformers_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path)
    with pytest.raises(ConfigError, match="quantization is fp8: GPT2LMHeadModel runs through transformers"):
        parts_of(tmp_path, quantization="fp8")


@pytest.mark.parametrize("setting", ["quantization", "pressure_quantization"])
def test_weights_that_cannot_be_rounded_are_named(tmp_path: Path, setting: str) -> None:
    tiny_models.save(lambda: tiny_models.llama(intermediate_size=128), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.layers.1.self_attn.q_proj.weight, or .* not finite"):
        parts_of(tmp_path, **{setting: "int8"})
