"""Tensors of GGUF files: equal to `gguf.quants` in every type, with Hugging Face's names and order of rows."""

from __future__ import annotations

import os
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from support.models import tiny_models
from support.models.gguf_files import F32, blocks, gguf_name, tensors_of, write_gguf, write_model
from tidewheel.errors import ConfigError
from tidewheel.models import gguf_file
from tidewheel.models.gguf_file import GGUFFile
from tidewheel.models.linear import GroupFormat
from tidewheel.models.weight_source import uncounted
from tidewheel_kernels.grouped_linear import GroupedWeights, dequantize

CPU = torch.device("cpu")
UP = "model.layers.0.mlp.up_proj.weight"
EXACT = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)
ROUNDED_SCALES = (Kind.Q4_K, Kind.Q5_K)
OTHERS = (Kind.Q6_K, Kind.Q2_K, Kind.Q3_K, Kind.IQ4_XS)
ALL = (*EXACT, *ROUNDED_SCALES, *OTHERS)


def one_matrix(folder: Path, values: np.ndarray, kind: Kind) -> GGUFFile:
    return GGUFFile(write_gguf(folder / "a.gguf", {}, {"blk.0.ffn_up.weight": (values, kind)}))


def copied(source: GGUFFile, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    destination = torch.full(source.tensors[name].shape, torch.nan, dtype=dtype)
    source.copy({name: destination}, uncounted)
    return destination


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_groups_have_the_values_of_the_reference(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "PIECE_BLOCKS", 7)
    raw = blocks(kind, 41, 512)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    source = one_matrix(tmp_path, raw, kind)
    weights = source.matrix(UP, CPU)
    assert isinstance(weights, GroupedWeights)
    form = source.tensors[UP].kind
    assert form == GroupFormat(weights.bits, weights.group_size, weights.minimums is not None)
    assert source.tensors[UP].num_bytes == weights.nbytes
    assert weights.bits == (4 if kind.name.startswith("Q4_") else 8)
    found = dequantize(weights)
    if kind in EXACT:
        assert torch.equal(found, expected)
        return
    groups = expected.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    if kind in ROUNDED_SCALES:
        assert weights.minimums is not None
        groups = groups + weights.minimums.float().abs().unsqueeze(-1)
        bound = groups * 2.0**-10  # half a unit of float16 of the scale, and of the minimum
    else:
        bound = groups * (0.5 / 127 + 2.0**-10)
    assert ((found - expected).unflatten(1, (-1, 32)).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_floats_are_those_of_the_reference(
    tmp_path: Path, kind: Kind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "PIECE_BLOCKS", 7)
    raw = blocks(kind, 41, 512)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind)).to(dtype)
    assert torch.equal(copied(one_matrix(tmp_path, raw, kind), UP, dtype), expected)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_floats_stay_as_they_are(tmp_path: Path, kind: Kind) -> None:
    values = np.random.default_rng(0).standard_normal((5, 64), dtype=np.float32)
    raw = gguf.quants.quantize(values, kind)
    source = one_matrix(tmp_path, raw, kind)
    found = source.matrix(UP, CPU)
    assert isinstance(found, torch.Tensor)
    assert (
        found.dtype
        == source.tensors[UP].kind
        == getattr(torch, {"F32": "float32", "F16": "float16"}.get(kind.name, "bfloat16"))
    )
    assert torch.equal(found.float(), torch.from_numpy(gguf.quants.dequantize(raw, kind)))


MODELS = {
    "llama": lambda: tiny_models.llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "tied llama": lambda: tiny_models.llama(tie_word_embeddings=True),
    "mistral": tiny_models.mistral,
    "qwen2": tiny_models.qwen2,
    "qwen3": tiny_models.qwen3,
}


@pytest.mark.parametrize("name", MODELS)
def test_tensors_have_the_names_and_rows_of_hugging_face(tmp_path: Path, name: str) -> None:
    model = tiny_models.save(MODELS[name], tmp_path / "hf")
    source = GGUFFile(write_model(tmp_path / "a.gguf", model))
    expected = tensors_of(model)
    assert {name: stored.shape for name, stored in source.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    destinations = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    read: list[int] = []
    source.copy(destinations, read.append)
    assert sum(read) == sum(tensor.nbytes for tensor in expected.values())
    for name, tensor in expected.items():
        assert torch.equal(destinations[name], tensor), name


def test_quantised_rows_of_a_llama_are_put_back(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.llama, tmp_path / "hf")
    source = GGUFFile(write_model(tmp_path / "a.gguf", model, Kind.Q4_1))
    for name in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{name}.weight"
        rows = gguf.quants.quantize(model.state_dict()[name].numpy(), Kind.Q4_1)
        expected = torch.from_numpy(gguf.quants.dequantize(rows, Kind.Q4_1))
        weights = source.matrix(name, CPU)
        assert isinstance(weights, GroupedWeights)
        assert torch.equal(dequantize(weights), expected)
        assert torch.equal(copied(source, name), expected)


def test_a_quantised_vector_is_copied_as_floats(tmp_path: Path) -> None:
    raw = blocks(Kind.Q8_0, 1, 64)[0]
    source = GGUFFile(write_gguf(tmp_path / "a.gguf", {}, {"output_norm.weight": (raw, Kind.Q8_0)}))
    assert source.tensors["model.norm.weight"].kind == torch.float32
    assert torch.equal(copied(source, "model.norm.weight"), torch.from_numpy(gguf.quants.dequantize(raw, Kind.Q8_0)))


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite(tmp_path: Path, kind: Kind, value: float) -> None:
    raw = blocks(kind, 40, 512)
    begin = 208 if kind == Kind.Q6_K else 0
    raw[3, begin : begin + 2] = np.array([value], dtype=np.float16).view(np.uint8)
    source = one_matrix(tmp_path, raw, kind)
    message = re.escape(f"{source.path}: {UP} is damaged") + ".*not finite.*download it again"
    with pytest.raises(ConfigError, match=message):
        source.matrix(UP, CPU)
    with pytest.raises(ConfigError, match=message):
        copied(source, UP)


@pytest.mark.parametrize(("kind", "size"), [(Kind.F32, 2), (Kind.Q8_0, 2), (Kind.Q8_0, 40 << 10)])
def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path, kind: Kind, size: int) -> None:
    values = np.zeros((64, 1024), dtype=np.float32)
    source = one_matrix(tmp_path, gguf.quants.quantize(values, kind), kind)
    os.truncate(source.path, size)
    with pytest.raises(ConfigError, match="became shorter while it was read"):
        source.matrix(UP, CPU)


def test_a_type_without_a_way_to_floats(tmp_path: Path) -> None:
    raw = np.zeros((2, 40), dtype=np.uint8)
    with pytest.raises(
        ConfigError, match=r"up_proj\.weight has type Q8_1, which is not read: take a file of another"
    ):
        one_matrix(tmp_path, raw, Kind.Q8_1)


def test_rows_that_heads_do_not_divide(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 3}
    tensors = {"blk.0.attn_q.weight": (np.zeros((8, 4), dtype=np.float32), F32)}
    with pytest.raises(ConfigError, match=r"q_proj\.weight has 8 rows for 3 heads"):
        GGUFFile(write_gguf(tmp_path / "a.gguf", metadata, tensors))


def test_names_of_the_writer_are_undone() -> None:
    for name in ("lm_head.weight", UP, "model.layers.12.self_attn.q_proj.bias"):
        assert gguf_file_name(gguf_name(name)) == name
    assert gguf_file_name("blk.0.attn_sinks.weight") == "blk.0.attn_sinks.weight"


def gguf_file_name(name: str) -> str:
    from tidewheel.models.gguf_file import hugging_face_name

    return hugging_face_name(name)
