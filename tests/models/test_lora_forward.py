"""A forward pass with an adapter computes the logits of weights that hold it, on other formats and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from support.models import tiny_models
from support.models.gguf_files import write_model
from support.models.peft_folders import write_merged, write_peft
from support.runner.thread_ranks import MemoryExchange, ThreadCollectives
from tidewheel.config import EngineConfig
from tidewheel.models.causal_lm import ForwardInput, no_progress
from tidewheel.models.decoder import Decoder
from tidewheel.models.lora_folder import read_lora
from tidewheel.models.shard import Shard
from tidewheel.models.trial_prompt import one_sequence, random_tokens
from tidewheel.runner.kv_tensors import KVTensors
from tidewheel.runner.loading import RunnerParts, load_parts
from tidewheel_kernels.lora import LoraGroups, group_tokens, max_tiles

CPU = torch.device("cpu")
NUM_TOKENS, MAX_LORAS, MAX_RANK, SLOT = 40, 3, 8, 1
TOKENS = random_tokens(NUM_TOKENS, tiny_models.VOCAB_SIZE, CPU)
LLAMA = partial(tiny_models.llama, intermediate_size=128)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def parts_of(model: Path, shard: Shard | None = None, **settings: object) -> RunnerParts:
    given = {"model": str(model), "dtype": "float32", "device": "cpu", "num_threads": 1, **settings}
    shard = shard or Shard()
    config = EngineConfig.from_settings({**given, "tensor_parallel_size": shard.num_ranks})
    return load_parts(config, no_progress, shard)


def with_slots(model: Path, shard: Shard | None = None, **settings: object) -> RunnerParts:
    return parts_of(model, shard, enable_lora=True, max_loras=MAX_LORAS, max_lora_rank=MAX_RANK, **settings)


def put(parts: RunnerParts, adapter: Path) -> RunnerParts:
    """Read an adapter to a slot."""
    assert isinstance(parts.model, Decoder)
    weights = read_lora(adapter, parts.model, MAX_RANK)
    for layer in parts.model.lora_linears:
        layer.lora.set(SLOT, weights.by_layer[layer.name])
    return parts


def groups(first: int, end: int) -> LoraGroups:
    """Return the groups of a step in which tokens from `first` to `end` have the adapter."""
    slots = np.full(NUM_TOKENS, -1, np.int32)
    slots[first:end] = SLOT
    columns = group_tokens(slots, max_tiles(NUM_TOKENS, MAX_LORAS))
    return LoraGroups(*(torch.from_numpy(column) for column in columns))


def logits_of(parts: RunnerParts, lora: LoraGroups | None = None) -> torch.Tensor:
    kv, positions = KVTensors(parts.layout, 4, CPU), torch.arange(NUM_TOKENS)
    step = ForwardInput(TOKENS, positions, one_sequence(NUM_TOKENS, 16, CPU), kv.layers, positions, lora=lora)
    with torch.inference_mode():
        return parts.model.forward(step)


ALL = groups(0, NUM_TOKENS)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).float().square().mean() / expected.float().square().mean()).sqrt())


@pytest.mark.parametrize("name", tiny_models.NATIVE)
def test_logits_are_those_of_merged_weights(tmp_path: Path, name: str) -> None:
    tiny_models.save(tiny_models.NATIVE[name], tmp_path / "base")
    adapter = write_peft(tmp_path / "adapter", tmp_path / "base", rank=5)
    merged = logits_of(parts_of(write_merged(tmp_path / "merged", tmp_path / "base", adapter)))
    base, parts = logits_of(parts_of(tmp_path / "base")), put(with_slots(tmp_path / "base"), adapter)
    found = logits_of(parts, ALL)
    assert relative_error(found, merged) < 1e-5 < 0.1 < relative_error(base, merged)
    assert torch.equal(logits_of(parts), base)


def test_tokens_before_those_with_an_adapter_are_of_the_base(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.llama, tmp_path / "base")
    parts = put(with_slots(tmp_path / "base"), write_peft(tmp_path / "adapter", tmp_path / "base"))
    base, mixed = logits_of(parts), logits_of(parts, groups(17, 30))
    assert torch.equal(mixed[:17], base[:17])
    assert (mixed[17:] != base[17:]).any(dim=1).all()


def write_safetensors(folder: Path, **changes: object) -> Path:
    tiny_models.save(partial(LLAMA, **changes), folder)
    return folder


def write_gguf(folder: Path) -> Path:
    return write_model(folder / "a.gguf", tiny_models.save(LLAMA, folder / "hf"), gguf.GGMLQuantizationType.F32)


FORMATS: dict[str, dict[str, object]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "int8-cache": {"kv_cache_dtype": "int8"},
    "int8-copy": {"pressure_quantization": "int8"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_bases_format_rounds_as_much_with_an_adapter(tmp_path: Path, name: str) -> None:
    base, settings = write_safetensors(tmp_path / "base"), FORMATS[name]
    adapter = write_peft(tmp_path / "adapter", base)
    exact, merged = (parts_of(folder) for folder in (base, write_merged(tmp_path / "merged", base, adapter)))
    plain, parts = parts_of(base, **settings), put(with_slots(base, **settings), adapter)
    if name == "int8-copy":
        plain.model.use("quantized")
        parts.model.use("quantized")
    rounded = logits_of(plain)
    assert torch.equal(logits_of(parts), rounded)
    error = relative_error(logits_of(parts, ALL), logits_of(merged))
    assert error < 2 * relative_error(rounded, logits_of(exact)) < 0.8


def test_adapters_of_gguf_bases(tmp_path: Path) -> None:
    """GGUF files hold queries and keys in another order of rows."""
    model = write_gguf(tmp_path)
    adapter = write_peft(tmp_path / "adapter", tmp_path / "hf")
    merged = logits_of(parts_of(write_merged(tmp_path / "merged", tmp_path / "hf", adapter)))
    assert relative_error(logits_of(put(with_slots(model), adapter), ALL), merged) < 1e-5


def ranked_logits(model: Path, adapter: Path, num_ranks: int, **settings: object) -> torch.Tensor:
    """Return the logits of ranks as threads, which all have the same."""
    exchange = MemoryExchange(num_ranks)

    def run(rank: int) -> torch.Tensor:
        try:
            shard = Shard(rank, num_ranks, ThreadCollectives(exchange, rank))
            return shard.gather(logits_of(put(with_slots(model, shard, **settings), adapter), ALL))
        except BaseException:
            exchange.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        first, *others = pool.map(run, range(num_ranks))
    assert all(torch.equal(first, other) for other in others)
    return first


RANKED: dict[str, tuple[Callable[[Path], Path], dict[str, object], float]] = {
    "float32": (write_safetensors, {}, 1e-5),
    "biases": (partial(write_safetensors, attention_bias=True, mlp_bias=True), {}, 1e-5),
    "tied": (partial(write_safetensors, tie_word_embeddings=True), {}, 1e-5),
    "int8": (write_safetensors, {"quantization": "int8"}, 0.06),
}
FLOATS = [name for name in RANKED if name != "int8"]  # four ranks have too few inputs for a group


@pytest.mark.parametrize(("name", "num_ranks"), [*((name, 2) for name in RANKED), *((name, 4) for name in FLOATS)])
def test_ranks_compute_the_logits_of_merged_weights(tmp_path: Path, name: str, num_ranks: int) -> None:
    write, settings, limit = RANKED[name]
    base = write(tmp_path / "base")
    adapter = write_peft(tmp_path / "adapter", base, rank=7, use_rslora=True)
    merged = logits_of(parts_of(write_merged(tmp_path / "merged", base, adapter)))
    assert relative_error(ranked_logits(base, adapter, num_ranks, **settings), merged) < limit
