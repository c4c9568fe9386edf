"""A quantised copy of the weights, with which a runner computes steps in between."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.models import tiny_models
from support.runner.decode_workloads import KINDS, workload
from support.runner.graphed_runner import LOADED_SIZES
from support.runner.recorded_graphs import RecordingAccelerator
from support.runner.step_loop import StepLoop
from tidewheel.batch import WeightVariant
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import ForwardInput, no_progress
from tidewheel.models.decoder import Decoder
from tidewheel.models.linear import GroupFormat
from tidewheel.models.loader import plan_model
from tidewheel.models.model_folder import read_config
from tidewheel.models.trial_prompt import one_sequence, random_tokens
from tidewheel.models.weight_stream import StoredTensor
from tidewheel.runner.kv_tensors import KVTensors
from tidewheel.runner.loading import RunnerParts, load_parts
from tidewheel.runner.model_runner import ModelRunner

CPU = torch.device("cpu")
NUM_TOKENS = 60


@pytest.fixture
def config(tmp_path: Path, config: EngineConfig) -> EngineConfig:
    tiny_models.save(lambda: tiny_models.llama(intermediate_size=128), tmp_path)
    return dataclasses.replace(config, model=str(tmp_path), max_num_seqs=5, max_model_len=128)


def parts_of(folder: Path, **settings: object) -> RunnerParts:
    given = {"model": str(folder), "dtype": "float32", "device": "cpu", "num_threads": 1, **settings}
    return load_parts(EngineConfig.from_settings(given), no_progress)


def logits_of(parts: RunnerParts, weights: WeightVariant = "full") -> torch.Tensor:
    kv, model = KVTensors(parts.layout, 4, CPU), parts.model
    assert isinstance(model, Decoder)
    model.use(weights)
    tokens, positions = random_tokens(NUM_TOKENS, tiny_models.VOCAB_SIZE, CPU), torch.arange(NUM_TOKENS)
    with torch.inference_mode():
        return model.forward(ForwardInput(tokens, positions, one_sequence(NUM_TOKENS, 16, CPU), kv.layers, positions))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("wanted", "error"), [("int8", 0.05), ("int4", 0.4)])
def test_full_weights_compute_bitwise_as_ever_after_the_copy(
    tmp_path: Path, wanted: str, error: float, tied: bool
) -> None:
    tiny_models.save(lambda: tiny_models.llama(intermediate_size=128, tie_word_embeddings=tied), tmp_path)
    plain, both = parts_of(tmp_path), parts_of(tmp_path, pressure_quantization=wanted)
    expected = logits_of(plain)
    assert torch.equal(logits_of(both), expected)
    rounded = logits_of(both, "quantized")
    assert 0 < ((rounded - expected).square().mean() / expected.square().mean()).sqrt() < error
    assert torch.equal(logits_of(both), expected)
    assert torch.equal(logits_of(both, "quantized"), rounded)


def test_the_copy_counts_as_weights_before_and_after_the_load(tmp_path: Path) -> None:
    tiny_models.save(lambda: tiny_models.llama(intermediate_size=128), tmp_path)
    plain, both = parts_of(tmp_path), parts_of(tmp_path, pressure_quantization="int8")
    assert both.info.weights_bytes == plain.info.weights_bytes + both.info.copy_bytes
    assert 0.2 < both.info.copy_bytes / plain.info.weights_bytes < 0.3  # of float32
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", pressure_quantization="int8")
    plan = plan_model(tmp_path, read_config(tmp_path), config, CPU)
    assert plan.check_fits(plan.open_source()) == both.info.weights_bytes


def tokens_of(runner: ModelRunner, *weights: WeightVariant) -> list[list[int]]:
    """Run steps with each of the weights in turn."""
    loop, steps = StepLoop(runner, has_quantized_copy=True), iter(weights * 1000)
    loop.scheduler._control._pressure.decide = lambda *_: next(steps) == "quantized"
    return loop.run(workload(KINDS["greedy"], 6))


def test_a_runner_switches_between_two_steps(config: EngineConfig) -> None:
    plain = StepLoop(ModelRunner.load(config)).run(workload(KINDS["greedy"], 6))
    runner = ModelRunner.load(dataclasses.replace(config, pressure_quantization="int4"))
    assert tokens_of(runner, "full") == plain
    rounded = tokens_of(runner, "quantized")
    assert rounded != plain
    assert tokens_of(runner, "full", "quantized") not in (plain, rounded)
    assert tokens_of(runner, "full") == plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_steps_of_few_rows_switch_too(tmp_path: Path, dtype: str) -> None:
    """They may run in one C call, which has weights of its own."""
    tiny_models.save(lambda: tiny_models.llama(intermediate_size=128), tmp_path)
    parts = parts_of(tmp_path, dtype=dtype, pressure_quantization="int4")
    kv, model = KVTensors(parts.layout, 4, CPU), parts.model
    assert isinstance(model, Decoder)
    meta, zero = one_sequence(1, 16, CPU), torch.zeros(1, dtype=torch.int64)

    def states(weights: WeightVariant) -> torch.Tensor:
        model.use(weights)
        step = ForwardInput(zero + 5, zero, dataclasses.replace(meta, num_decodes=1), kv.layers, zero)
        with torch.inference_mode():
            return model.forward_with_states(step, zero)[1]

    full, rounded = states("full"), states("quantized")
    assert not torch.equal(full, rounded)
    assert torch.equal(states("full"), full) and torch.equal(states("quantized"), rounded)


def test_each_of_the_weights_has_graphs(
    config: EngineConfig, accelerator: RecordingAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(config, max_num_batched_tokens=64, pressure_quantization="int8")
    used, use = list[WeightVariant](), Decoder.use
    monkeypatch.setattr(Decoder, "use", lambda self, weights: (used.append(weights), use(self, weights))[1])
    runner = ModelRunner.load(small)
    graphs = {key: [graph.num_rows for graph in one._decodes] for key, one in runner._graphs_of.items()}
    assert graphs == {("quantized", False): LOADED_SIZES, ("full", False): LOADED_SIZES}
    assert used[-2:] == ["quantized", "full"]
    assert runner.info.graph_bytes == accelerator.pools[-1].num_bytes


def test_weights_that_are_quantised_already_are_refused(tmp_path: Path) -> None:
    tiny_models.save(lambda: tiny_models.llama(intermediate_size=128), tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", pressure_quantization="int8")
    plan = plan_model(tmp_path, read_config(tmp_path), config, CPU)
    stored = {name: StoredTensor(Path(), shape, GroupFormat(8)) for name, shape in plan.native.shapes.items()}
    with pytest.raises(ConfigError, match=r"pressure_quantization is int8: .* quantised already; set it to none"):
        plan.check_fits(SimpleNamespace(tensors=stored))


def test_a_matrix_without_groups_is_named(tmp_path: Path) -> None:
    tiny_models.save(lambda: tiny_models.llama(intermediate_size=100), tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"pressure_quantization: .*down_proj.weight is in a matrix of 64 x 100, .* multiples of 32 columns",
    ):
        parts_of(tmp_path, pressure_quantization="int8")


def test_models_that_run_through_transformers_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path)
    with pytest.raises(ConfigError, match="pressure_quantization is int8: GPT2LMHeadModel runs through transformers"):
        parts_of(tmp_path, pressure_quantization="int8")
