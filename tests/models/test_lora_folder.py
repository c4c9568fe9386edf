"""LoRA adapters of PEFT: what is read, and each defect in one line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from support.models import tiny_models, tiny_whisper
from support.models.loading import CPU, loaded
from support.models.odd_files import ODD_FILES, put_odd_file
from support.models.peft_folders import (
    CONFIG_NAME,
    LINEARS,
    PREFIX,
    WEIGHTS_NAME,
    deltas,
    read_peft,
    write_folder,
    write_peft,
)
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.decoder import Decoder
from tidewheel.models.loader import plan_model
from tidewheel.models.lora_folder import LoraFile, LoraWeights, names_of, read_lora
from tidewheel.models.model_folder import read_config
from tidewheel.models.shard import Shard

MAX_RANK = 16
LAYER = "model.layers.1.self_attn.q_proj"
A, B = f"{PREFIX}{LAYER}.lora_A.weight", f"{PREFIX}{LAYER}.lora_B.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_models.save(partial(tiny_models.llama, intermediate_size=128), folder)
    return folder


@pytest.fixture(scope="module")
def model(base: Path) -> Decoder:
    return decoder(base)


def decoder(base: Path, shard: Shard | None = None, **settings: object) -> Decoder:
    """Return the empty model, or one rank's part of it, on the device "meta"."""
    given = {"model": str(base), "dtype": "float32", "device": "cpu", **settings}
    config = EngineConfig.from_settings({**given, "tensor_parallel_size": (shard or Shard()).num_ranks})
    plan = plan_model(base, read_config(base), config, CPU, shard)
    assert isinstance(plan.rank_native, Decoder)
    return plan.rank_native


def matrices(weights: LoraWeights, model: Decoder) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield checkpoint name, A and B of each part that the adapter has."""
    for layer in model.lora_linears:
        for name, part in zip(layer.parts, weights.by_layer[layer.name], strict=True):
            if part is not None:
                yield name, part.a, part.b


def products(weights: LoraWeights, model: Decoder) -> dict[str, torch.Tensor]:
    return {name: b.float() @ a.float() for name, a, b in matrices(weights, model)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


CASES: dict[str, dict[str, object]] = {
    "all": {},
    "attention": {"targets": ["q_proj", "v_proj"]},
    "one-layer": {"layers": [1], "targets": ["o_proj", "gate_proj", "down_proj"]},
    "alpha": {"rank": 3, "alpha": 0.75},
    "rank-stabilised": {"rank": 16, "use_rslora": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "as-peft-writes-it": {
        "alora_invocation_tokens": None, "arrow_config": None, "auto_mapping": None, "corda_config": None,
        "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None, "layer_replication": None,
        "layers_pattern": None, "loftq_config": {}, "lora_bias": False, "megatron_config": None,
        "megatron_core": "megatron.core", "peft_version": "0.18.1", "qalora_group_size": 16,
        "target_parameters": [], "trainable_token_indices": None, "use_qalora": False,
    },
    "regex-of-targets": {"target_modules": r".*(q|v)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "eva": {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
    "conv-layout-flag": {"fan_in_fan_out": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products_are_what_peft_adds(tmp_path: Path, base: Path, model: Decoder, name: str) -> None:
    adapter = write_peft(tmp_path, base, **CASES[name])
    assert_same(products(read_lora(adapter, model, MAX_RANK), model), deltas(adapter))


def test_layers_without_the_adapter_have_none(tmp_path: Path, base: Path, model: Decoder) -> None:
    weights = read_lora(write_peft(tmp_path, base, layers=[0], targets=["k_proj", "down_proj"]), model, MAX_RANK)
    assert list(weights.by_layer) == [layer.name for layer in model.lora_linears]
    has_part = {
        name: [part is not None for part in parts] for name, parts in weights.by_layer.items() if any(parts)
    }  # fmt: skip
    assert has_part == {
        "model.layers.0.self_attn.q_proj.weight": [False, True, False],
        "model.layers.0.mlp.down_proj.weight": [True],
    }


def test_names_with_the_adapters_name(tmp_path: Path, base: Path, model: Decoder) -> None:
    adapter = write_peft(tmp_path, base)
    expected = deltas(adapter)
    fields, tensors = read_peft(adapter)
    write_folder(
        adapter, fields, {name.replace(".weight", ".default.weight"): each for name, each in tensors.items()}
    )
    assert_same(products(read_lora(adapter, model, MAX_RANK), model), expected)


def test_ranks_and_bytes(tmp_path: Path, base: Path, model: Decoder) -> None:
    adapter = write_peft(tmp_path, base, rank=9)
    weights = read_lora(adapter, model, MAX_RANK)
    assert weights.rank == 9
    tensors = [tensor for _, a, b in matrices(weights, model) for tensor in (a, b)]
    assert weights.num_bytes == sum(tensor.nbytes for tensor in tensors)
    assert all(a.t().is_contiguous() and b.t().is_contiguous() for _, a, b in matrices(weights, model))


def test_for_a_gpu_both_are_contiguous_in_one_piece_of_pinned_memory(
    tmp_path: Path, base: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    adapter = write_peft(tmp_path, base)
    of_cpu, dtype = read_lora(adapter, model, MAX_RANK), model.norm.dtype
    values = LoraFile(adapter, model, MAX_RANK).rounded(dtype, torch.device("cuda", 1))
    [memory] = pinned
    assert memory.nbytes == of_cpu.num_bytes
    for name, a, b in matrices(of_cpu, model):
        of_gpu = [values[half] for half in names_of(name.removesuffix(".weight"))]
        assert of_gpu[0].equal(a) and of_gpu[1].equal(b)
    assert all(value.is_contiguous() for value in values.values())
    assert {value.untyped_storage().data_ptr() for value in values.values()} == {memory.data_ptr()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_b_is_rounded_once_after_its_scale(tmp_path: Path, base: Path, dtype: torch.dtype) -> None:
    rounded = decoder(base, dtype=str(dtype).removeprefix("torch."))
    adapter = write_peft(tmp_path, base, rank=3, alpha=10)
    tensors = read_peft(adapter)[1]
    for name, a, b in matrices(read_lora(adapter, rounded, MAX_RANK), rounded):
        module = PREFIX + name.removesuffix(".weight")
        assert a.equal(tensors[f"{module}.lora_A.weight"].to(dtype))
        assert b.equal((tensors[f"{module}.lora_B.weight"] * (10 / 3)).to(dtype))


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"quantization": "fp8"}], ids=str)
def test_a_loaded_model_reads_as_an_empty_one(tmp_path: Path, base: Path, settings: dict[str, object]) -> None:
    full = loaded(
        base, EngineConfig.from_settings({"model": str(base), "device": "cpu", "num_threads": 1, **settings})
    )
    assert isinstance(full, Decoder)
    adapter = write_peft(tmp_path, base)
    assert_same(products(read_lora(adapter, full, MAX_RANK), full), deltas(adapter))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_of_ranks_sum_to_the_whole(tmp_path: Path, base: Path, num_ranks: int) -> None:
    """With four ranks, two share each head of keys and values."""
    adapter = write_peft(tmp_path, base, rank=5)
    found = {name: torch.full_like(delta, float("nan")) for name, delta in deltas(adapter).items()}
    for rank in range(num_ranks):
        part = decoder(base, Shard(rank, num_ranks))
        for name, product in products(read_lora(adapter, part, MAX_RANK), part).items():
            assert product.shape == part.shapes[name]
            axis, begin, end = part.tensor_parts[name]
            found[name].narrow(axis, begin, end - begin).copy_(product)
    assert_same(found, deltas(adapter))


def test_the_rank_that_has_the_values_checks_them(tmp_path: Path, base: Path) -> None:
    adapter = changed(write_peft(tmp_path, base), B, lambda b: b.index_fill(0, torch.tensor([0]), float("nan")))
    assert read_lora(adapter, decoder(base, Shard(1, 2)), MAX_RANK)
    with pytest.raises(ConfigError, match="NaN"):
        read_lora(adapter, decoder(base, Shard(0, 2)), MAX_RANK)


def changed(adapter: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    fields, tensors = read_peft(adapter)
    return write_folder(adapter, fields, tensors | {name: change(tensors[name]).contiguous()})


def with_tensor(name: str, *shape: int) -> Callable[[Path], object]:
    def add(adapter: Path) -> None:
        fields, tensors = read_peft(adapter)
        write_folder(adapter, fields, tensors | {name: torch.zeros(shape)})

    return add


def without(name: str) -> Callable[[Path], object]:
    def remove(adapter: Path) -> None:
        fields, tensors = read_peft(adapter)
        write_folder(adapter, fields, {key: each for key, each in tensors.items() if key != name})

    return remove


def with_field(key: str, value: object) -> Callable[[Path], object]:
    def write(adapter: Path) -> None:
        fields = json.loads((adapter / CONFIG_NAME).read_text())
        (adapter / CONFIG_NAME).write_text(json.dumps({**fields, key: value}))

    return write


def as_pickle(adapter: Path) -> None:
    (adapter / WEIGHTS_NAME).rename(adapter / "adapter_model.bin")


def with_huge_header(adapter: Path) -> None:
    header = json.dumps(
        {f"tensor {i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10_000)}
    )
    (adapter / WEIGHTS_NAME).write_bytes(len(header).to_bytes(8, "little") + header.encode())


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    return lambda adapter: changed(adapter, name, change)


def both(change_a: Callable[[torch.Tensor], torch.Tensor], change_b: Callable[[torch.Tensor], torch.Tensor]) -> (
    Callable[[Path], object]
):  # fmt: skip
    return lambda adapter: changed(changed(adapter, A, change_a), B, change_b)


NEEDS, NO_PLACE = "this base asks for", "weight, which this base has no place for"
ONLY_PLAIN = "it must be off or left out: only plain LoRA of linear layers is served"
DEFECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no-config": (lambda adapter: (adapter / CONFIG_NAME).unlink(), f"{CONFIG_NAME} does not exist: give the folder"),
    "no-json": (lambda adapter: (adapter / CONFIG_NAME).write_text("{"), f"{CONFIG_NAME} is not JSON"),
    "large-config": (
        lambda adapter: (adapter / CONFIG_NAME).write_text(" " * (2 << 20)), "2097152 bytes, and at most 262144 are"
    ),
    "no-weights": (lambda adapter: (adapter / WEIGHTS_NAME).unlink(), "has no weights: save the adapter with PEFT"),
    "pickle": (as_pickle, "has pickled weights only, which are never loaded: save the adapter with PEFT as"),
    "not-lora": (with_field("peft_type", "IA3"), "peft_type is 'IA3', it must be LORA"),
    "no-type": (with_field("peft_type", None), "peft_type is None, it must be text"),
    "dora": (with_field("use_dora", True), f"use_dora is True, {ONLY_PLAIN}"),
    "bias": (with_field("bias", "lora_only"), f"bias is 'lora_only', {ONLY_PLAIN}"),
    "lora-bias": (with_field("lora_bias", True), f"lora_bias is True, {ONLY_PLAIN}"),
    "saved-modules": (with_field("modules_to_save", ["lm_head"]), rf"modules_to_save is \['lm_head'\], {ONLY_PLAIN}"),
    "replication": (with_field("layer_replication", [[0, 2]]), rf"layer_replication is \[\[0, 2\]\], {ONLY_PLAIN}"),
    "activated": (with_field("alora_invocation_tokens", [1]), rf"alora_invocation_tokens is \[1\], {ONLY_PLAIN}"),
    "tokens": (with_field("trainable_token_indices", [5]), rf"trainable_token_indices is \[5\], {ONLY_PLAIN}"),
    "parameters": (with_field("target_parameters", ["w"]), rf"target_parameters is \['w'\], {ONLY_PLAIN}"),
    "quantised": (with_field("use_qalora", True), f"use_qalora is True, {ONLY_PLAIN}"),
    "unknown-field": (with_field("use_tomorrow", 1), f"use_tomorrow is 1, {ONLY_PLAIN}"),
    "base-changed": (with_field("init_lora_weights", "pissa_niter_4"), "'pissa_niter_4', it must be .*convert"),
    "rank-pattern": (with_field("rank_pattern", {"q_proj": 2}), rf"rank_pattern is \{{'q_proj': 2\}}, {ONLY_PLAIN}"),
    "alpha-pattern": (with_field("alpha_pattern", {"q_proj": 2}), rf"alpha_pattern is .*2.*, {ONLY_PLAIN}"),
    "no-rank": (with_field("r", None), "r is None, it must be an integer from 1"),
    "no-alpha": (with_field("lora_alpha", 0), "lora_alpha is 0, it must be a number from 1e-12"),
    "nan-alpha": (with_field("lora_alpha", float("nan")), "lora_alpha is nan, it must be a number"),
    "rank-stabilised": (with_field("use_rslora", "yes"), "use_rslora is 'yes', it must be true or false"),
    "other-rank": (with_field("r", 5), rf"lora_A.weight has shape \[4, 128\], {NEEDS} \[5, 128\]"),
    "huge-header": (with_huge_header, r"header claims \d+ bytes, and at most 79872 are read"),
    "cut": (
        lambda adapter: os.truncate(adapter / WEIGHTS_NAME, (adapter / WEIGHTS_NAME).stat().st_size - 1),
        "not a valid safetensors file.* not fully",
    ),
    "longer": (
        lambda adapter: os.truncate(adapter / WEIGHTS_NAME, 1 << 30), "not a valid safetensors file.* not fully"
    ),
    "missing-a": (without(A), f"the checkpoint lacks {LAYER}.lora_A.weight; its files and this base do not match"),
    "missing-b": (without(B), f"the checkpoint lacks {LAYER}.lora_B.weight; its files and this base do not"),
    "unknown-layer": (
        with_tensor(f"{PREFIX}model.layers.7.self_attn.q_proj.lora_A.weight", 4, 64),
        f"has model.layers.7.self_attn.q_proj.lora_A.{NO_PLACE}",
    ),
    "magnitudes": (with_tensor(f"{PREFIX}{LAYER}.lora_magnitude_vector", 64), "lora_magnitude_vector, which this"),
    "bias-of-b": (with_tensor(f"{PREFIX}{LAYER}.lora_B.bias", 64), r"lora_B.bias, which this base has no place for"),
    "twice": (with_tensor(A.replace(".weight", ".default.weight"), 4, 64), "has two adapters: keep one of them"),
    "norm": (with_tensor(f"{PREFIX}model.norm.lora_A.weight", 4, 64), f"has model.norm.lora_A.{NO_PLACE}"),
    "embedding": (with_tensor(f"{PREFIX}model.embed_tokens.lora_embedding_A", 4, 384), "embed_tokens.*: adapters"),
    "output": (with_tensor(f"{PREFIX}lm_head.lora_A.weight", 4, 64), "lm_head.lora_A.weight: adapters change"),
    "saved-output": (with_tensor(f"{PREFIX}lm_head.weight", 384, 64), "lm_head.weight: adapters change"),
    "inputs": (
        tensor(A, lambda a: a[:, :-1]), rf"{LAYER}.lora_A.weight has shape \[4, 63\], {NEEDS} \[4, 64\]"
    ),
    "outputs": (
        tensor(B, lambda b: torch.cat((b, b))), rf"{LAYER}.lora_B.weight has shape \[128, 4\], {NEEDS} \[64, 4\]"
    ),
    "halves": (tensor(B, lambda b: b[:, :3]), rf"{LAYER}.lora_B.weight has shape \[64, 3\], {NEEDS} \[64, 4\]"),
    "scalar": (tensor(A, lambda a: a[0, 0]), rf"{LAYER}.lora_A.weight has shape \[\], {NEEDS} \[4, 64\]"),
    "rank": (with_field("r", 20), f"r is 20, it must be from 1 to max_lora_rank, which is {MAX_RANK}$"),
    "integers": (tensor(A, lambda a: a.to(torch.int8)), rf"{LAYER}.lora_A.weight has dtype torch.int8; only float"),
    "none": (lambda adapter: write_folder(adapter, read_peft(adapter)[0], {}), "has no tensors: save the adapter"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_named_before_a_tensor_is_read(tmp_path: Path, base: Path, model: Decoder, name: str) -> None:
    break_it, message = DEFECTS[name]
    adapter = write_peft(tmp_path, base)
    break_it(adapter)
    with pytest.raises(ConfigError, match=message) as error:
        LoraFile(adapter, model, MAX_RANK)
    assert str(error.value).startswith(str(adapter))
    assert "\n" not in str(error.value)


VALUES = {
    "nan-a": (A, lambda a: a.index_fill(1, torch.tensor([63]), float("nan")), "lora_A"),
    "infinite-b": (B, lambda b: b.index_fill(0, torch.tensor([63]), float("-inf")), "lora_B"),
    "infinite-after-the-scale": (B, lambda b: b.index_fill(0, torch.tensor([0]), 3e38), "lora_B"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_not_finite(tmp_path: Path, base: Path, model: Decoder, name: str) -> None:
    tensor, change, half = VALUES[name]
    adapter = changed(write_peft(tmp_path, base), tensor, change)
    assert LoraFile(adapter, model, MAX_RANK)
    with pytest.raises(ConfigError, match=rf"{LAYER}.{half}.weight has NaN or infinite values"):
        read_lora(adapter, model, MAX_RANK)


def test_values_that_the_models_dtype_does_not_hold(tmp_path: Path, base: Path) -> None:
    adapter = changed(write_peft(tmp_path, base), A, lambda a: a * 1e6)
    with pytest.raises(ConfigError, match=r"NaN or infinite values as torch\.float16"):
        read_lora(adapter, decoder(base, dtype="float16"), MAX_RANK)


@pytest.mark.parametrize("file", [CONFIG_NAME, WEIGHTS_NAME])
@pytest.mark.parametrize("kind", ODD_FILES)
def test_odd_files(tmp_path: Path, base: Path, model: Decoder, kind: str, file: str) -> None:
    adapter = write_peft(tmp_path, base)
    put_odd_file(adapter / file, kind)
    with pytest.raises(ConfigError, match=f"{file} (cannot be read|does not exist)"):
        LoraFile(adapter, model, MAX_RANK)


def test_a_folder_that_is_none(tmp_path: Path, model: Decoder) -> None:
    with pytest.raises(ConfigError, match=r"missing/adapter_config\.json does not exist"):
        read_lora(tmp_path / "missing", model, MAX_RANK)


def test_lack_of_memory(tmp_path: Path, base: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(LoraFile, "rounded", fail)
    with pytest.raises(ConfigError, match="is not loaded for lack of host memory: DefaultCPUAllocator"):
        read_lora(write_peft(tmp_path, base), model, MAX_RANK)


def test_adapters_of_every_native_layer_exist(base: Path, model: Decoder) -> None:
    names = [name for layer in model.lora_linears for name in layer.parts]
    assert {name.rsplit(".", 2)[-2] for name in names} == set(LINEARS)
    assert len(names) == len(set(names)) == 2 * len(LINEARS)


def test_models_through_transformers_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path)
    with pytest.raises(ConfigError, match=r"enable_lora is true: GPT2LMHeadModel runs through.*; set it to false"):
        plan_model(tmp_path, read_config(tmp_path), EngineConfig(model=str(tmp_path), enable_lora=True), CPU)


def test_speech_models_are_refused(tmp_path: Path) -> None:
    tiny_whisper.save(tmp_path)
    config = EngineConfig(model=str(tmp_path), enable_lora=True)
    with pytest.raises(ConfigError, match=r"enable_lora is true: Whisper.* without shards or LoRA; set it to false"):
        plan_model(tmp_path, read_config(tmp_path), config, CPU)
