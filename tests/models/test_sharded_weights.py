"""Ranks hold parts of the weights, in every format, and compute the logits of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch

from support.models import tiny_models
from support.models.gguf_files import write_model
from support.models.judging import NAME, judge
from support.models.quantized_formats import CASES, save_quantized_llama
from support.runner.thread_ranks import MemoryExchange, ThreadCollectives
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models import weight_stream
from tidewheel.models.causal_lm import ForwardInput, no_progress
from tidewheel.models.loader import load_model, plan_model
from tidewheel.models.model_folder import read_config
from tidewheel.models.shard import Shard, TensorPart
from tidewheel.models.trial_prompt import one_sequence, random_tokens
from tidewheel.models.weight_source import RandomWeights
from tidewheel.models.weight_stream import StoredTensor, copy_tensors
from tidewheel.runner import device
from tidewheel.runner.kv_tensors import KVTensors
from tidewheel.runner.loading import RunnerParts, load_parts

CPU = torch.device("cpu")
NUM_TOKENS = 40
TOKENS = random_tokens(NUM_TOKENS, tiny_models.VOCAB_SIZE, CPU)
LLAMA = partial(tiny_models.llama, intermediate_size=128)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def parts_of(model: Path, shard: Shard, **settings: object) -> RunnerParts:
    given = {"model": str(model), "dtype": "float32", "device": "cpu", "num_threads": 1, **settings}
    config = EngineConfig.from_settings({**given, "tensor_parallel_size": shard.num_ranks})
    return load_parts(config, no_progress, shard)


def logits_of(parts: RunnerParts, *, use_copy: bool = False) -> torch.Tensor:
    kv = KVTensors(parts.layout, 4, CPU)
    positions = torch.arange(NUM_TOKENS)
    step = ForwardInput(TOKENS, positions, one_sequence(NUM_TOKENS, 16, CPU), kv.layers, positions)
    if use_copy:
        parts.model.use("quantized")
    with torch.inference_mode():
        return parts.model.forward(step)


def ranked_logits(model: Path, num_ranks: int, *, use_copy: bool = False, **settings: object) -> torch.Tensor:
    """Return the logits of ranks as threads, which all have the same."""
    exchange = MemoryExchange(num_ranks)

    def run(rank: int) -> torch.Tensor:
        try:
            shard = Shard(rank, num_ranks, ThreadCollectives(exchange, rank))
            return shard.gather(logits_of(parts_of(model, shard, **settings), use_copy=use_copy))
        except BaseException:
            exchange.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        first, *others = pool.map(run, range(num_ranks))
    assert all(torch.equal(first, other) for other in others)
    return first


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).square().mean() / expected.square().mean()).sqrt())


def write_safetensors(folder: Path, **changes: object) -> Path:
    tiny_models.save(partial(LLAMA, **changes), folder)
    return folder


def write_gguf(folder: Path, kind: str) -> Path:
    model = tiny_models.save(LLAMA, folder / "hf")
    return write_model(folder / "a.gguf", model, gguf.GGMLQuantizationType[kind])


# The kernels round activations to 8 bits: another order of sums moves a few of them to the next number.
FORMATS: dict[str, tuple[Callable[[Path], Path], dict[str, object], float]] = {
    "float32": (write_safetensors, {}, 1e-5),
    "tied": (partial(write_safetensors, tie_word_embeddings=True), {}, 1e-5),
    "biases": (partial(write_safetensors, attention_bias=True, mlp_bias=True), {}, 1e-5),
    "int8": (write_safetensors, {"quantization": "int8"}, 0.02),
    "int4": (write_safetensors, {"quantization": "int4"}, 0.02),
    "fp8": (write_safetensors, {"quantization": "fp8"}, 0.2),  # a row's scale is that of a rank's inputs
    "copy": (write_safetensors, {"pressure_quantization": "int8", "use_copy": True}, 0.02),
    "gguf-f16": (partial(write_gguf, kind="F16"), {}, 1e-5),
    "gguf-q8": (partial(write_gguf, kind="Q8_0"), {}, 0.02),
    "gguf-q4": (partial(write_gguf, kind="Q4_0"), {}, 0.02),
    "gguf-q4-as-floats": (partial(write_gguf, kind="Q4_0"), {"quantization": "none"}, 1e-5),
    "int8-cache": (write_safetensors, {"kv_cache_dtype": "int8"}, 1e-3),
    "fp8-cache": (write_safetensors, {"kv_cache_dtype": "fp8_e4m3"}, 1e-3),
}


@pytest.mark.parametrize("name", FORMATS)
def test_two_ranks_compute_the_logits_of_one(tmp_path: Path, name: str) -> None:
    write, settings, limit = FORMATS[name]
    model, use_copy = write(tmp_path), bool(settings.get("use_copy"))
    settings = {key: value for key, value in settings.items() if key != "use_copy"}
    expected = logits_of(parts_of(model, Shard(), **settings), use_copy=use_copy)
    assert relative_error(ranked_logits(model, 2, use_copy=use_copy, **settings), expected) < limit


def test_random_weights_of_equal_parts_are_equal(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    assert ranked_logits(tmp_path, 4, load_format="dummy").isfinite().all()
    found = []
    for part in (TensorPart(0, 0, 4), TensorPart(0, 0, 4), TensorPart(0, 4, 8)):
        source = RandomWeights({"a.weight": (8, 4)}, torch.float32, 0)
        source.take_parts({"a.weight": part})
        found.append(source.plain("a.weight", CPU))
    assert found[0].equal(found[1]) and not found[0].equal(found[2])


def test_no_chunk_or_destination_is_a_whole_split_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(tmp_path)
    sizes: dict[str, int] = {}
    plan_chunks = weight_stream.plan_chunks

    def noted(tensors: dict[str, StoredTensor], destinations: dict[str, torch.Tensor], max_bytes: int) -> object:
        sizes.update({name: tensor.numel() for name, tensor in destinations.items()})
        chunks = plan_chunks(tensors, destinations, 1024)
        assert max(chunk.size for chunk in chunks) <= 1024
        return chunks

    monkeypatch.setattr(weight_stream, "plan_chunks", noted)
    parts = parts_of(tmp_path, Shard(1, 2))
    whole = parts_of(tmp_path, Shard()).model.shapes
    split = {name for name in whole if "proj" in name or "embed" in name or "lm_head" in name}
    sizes.clear()
    parts_of(tmp_path, Shard(1, 2))
    assert {name for name, size in sizes.items() if size < math.prod(whole[name])} == split
    assert parts.model.weights_bytes < 0.55 * sum(4 * math.prod(shape) for shape in whole.values())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [None, TensorPart(0, 3, 10), TensorPart(1, 5, 9), TensorPart(1, 0, 1)], ids=str)
def test_parts_of_a_file(tmp_path: Path, part: TensorPart | None, stored: torch.dtype) -> None:
    whole = torch.randn(13, 11).to(stored)
    (tmp_path / "a").write_bytes(b"12345678" + whole.view(torch.uint8).numpy().tobytes())
    tensor = StoredTensor(tmp_path / "a", (13, 11), stored, 8, part)
    destination, counts = torch.full(tensor.part_shape, float("nan")), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weight_stream, "SLOT_BYTES", 100)
        copy_tensors({"a": tensor}, {"a": destination}, counts.append)
    axis, begin, end = part or (0, 0, 13)
    assert destination.equal(whole.narrow(axis, begin, end - begin).float())
    assert sum(counts) == tensor.num_bytes


def test_blocks_that_ranks_would_split_are_refused(tmp_path: Path) -> None:
    model = write_gguf(tmp_path, "Q4_0")
    with pytest.raises(ConfigError, match="blocks of 32 inputs, which ranks with 16 inputs split: lower tensor_par"):
        parts_of(model, Shard(0, 4))


def test_matrices_that_groups_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    with pytest.raises(ConfigError, match=r"is in a matrix of 64 x 16, .* multiples of 32 columns; set quantization"):
        parts_of(tmp_path, Shard(0, 4), quantization="int8")


@pytest.mark.parametrize("name", CASES)
def test_quantized_checkpoints_are_refused_by_name(tmp_path: Path, name: str) -> None:
    save_quantized_llama(tmp_path, CASES[name])
    with pytest.raises(ConfigError, match=r"codes, which are not split between ranks: set tensor_parallel_size to 1"):
        parts_of(tmp_path, Shard(0, 2))


def test_a_check_before_the_load_refuses_what_the_load_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_cores", lambda: 4)
    config = EngineConfig(
        model=str(write_gguf(tmp_path, "Q4_0")), device="cpu", num_blocks=64, tensor_parallel_size=4
    )
    errors = [each.message for each in judge(config)[0] if each.severity == "error"]
    assert len(errors) == 1
    assert "blocks of 32 inputs, which ranks with 16 inputs split" in errors[0]


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_the_progress_of_a_part_ends_at_one(tmp_path: Path, quantization: str) -> None:
    write_safetensors(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", quantization=quantization, tensor_parallel_size=2)
    plan, fractions = plan_model(tmp_path, read_config(tmp_path), config, CPU, Shard(1, 2)), []
    load_model(plan, plan.open_source(), lambda _stage, fraction: fractions.append(fraction))
    assert fractions[-1] == max(fractions) == 1.0


def test_models_whose_layers_are_not_split_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2: GPT2LMHeadModel runs through transformers"):
        parts_of(tmp_path, Shard(0, 2))


def test_a_check_before_the_load_counts_the_memory_of_all_ranks(tmp_path: Path) -> None:
    tiny_models.save_byte_llama(tmp_path)
    needs = []
    for num_ranks in (1, 2):
        config = EngineConfig(model=str(tmp_path), device="cpu", num_blocks=64, tensor_parallel_size=num_ranks)
        problems, report = judge(config)
        assert [problem.message for problem in problems if problem.severity == "error"] == []
        needs.append(report.needs[NAME][1])
    assert needs[0].cache == needs[1].cache
    assert needs[0].weights < needs[1].weights < 1.1 * needs[0].weights  # norms are held by each rank


@pytest.mark.parametrize(
    ("changes", "num_ranks", "objection"),
    [
        ({}, 3, "num_attention_heads is 4, no multiple of it; set it to 1 or 2 or 4"),
        ({"intermediate_size": 126}, 4, "intermediate_size is 126, no multiple of it; set it to 1 or 2$"),
        ({"vocab_size": 385}, 2, "vocab_size is 385, no multiple of it; set it to 1$"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96, "intermediate_size": 96}, 6,
            "num_key_value_heads is 4, neither a multiple nor a factor of it; set it to 1 or 2 or 4",
        ),
    ],
)  # fmt: skip
def test_numbers_of_ranks_that_do_not_fit(
    tmp_path: Path, changes: dict[str, int], num_ranks: int, objection: str
) -> None:
    write_safetensors(tmp_path, **changes)
    with pytest.raises(ConfigError, match=objection) as error:
        parts_of(tmp_path, Shard(0, num_ranks))
    assert str(error.value).startswith(f"tensor_parallel_size is {num_ranks}: ")
