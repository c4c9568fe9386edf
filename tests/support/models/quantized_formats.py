"""Quantised layers as the formats define them, and folders of small models made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from support.models import tiny_models

Tensors = dict[str, torch.Tensor]
Integers = NDArray[np.int64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output in each field of a word


class QuantizedMatrix(NamedTuple):
    codes: Integers  # [out, in]
    scales: torch.Tensor  # [out, groups] float16
    zeros: Integers  # [out, groups]
    groups: Integers  # [in] of each input

    def values(self) -> torch.Tensor:
        scales = self.scales.double()[:, torch.from_numpy(self.groups)]
        return (scales * torch.from_numpy(self.codes - self.zeros[:, self.groups])).float()


def random_matrix(
    out: int, inputs: int, bits: int, group_size: int, *, symmetric: bool, ordered: bool = False
) -> QuantizedMatrix:
    """Return random codes with scales that are powers of 2, whose products float16 holds exactly."""
    draw = np.random.default_rng(inputs + bits + group_size)
    groups = np.arange(inputs) // group_size
    num_groups = inputs // group_size
    zeros = np.full((out, num_groups), 1 << bits - 1) if symmetric else draw.integers(0, 1 << bits, (out, num_groups))
    return QuantizedMatrix(
        draw.integers(0, 1 << bits, (out, inputs)),
        torch.from_numpy(2.0 ** draw.integers(-9, -4, (out, num_groups))).half(),
        zeros,
        draw.permutation(groups) if ordered else groups,
    )


def rounded(
    weight: torch.Tensor, bits: int, group_size: int, *, symmetric: bool, ordered: bool = False
) -> QuantizedMatrix:
    """Round a matrix [out, in] by groups; `ordered`: of inputs in falling order of their largest weight."""
    inputs = weight.shape[1]
    order = weight.abs().amax(0).argsort(descending=True) if ordered else torch.arange(inputs)
    blocks = weight[:, order].double().unflatten(1, (-1, group_size))
    top = (1 << bits) - 1
    if symmetric:
        scales = (blocks.abs().amax(-1) * 2 / top).bfloat16().half()
        zeros = torch.full_like(scales, 1 << bits - 1)
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scales = ((high - low) / top).bfloat16().half()
        zeros = (-low / scales).round().clamp(0, top)
    codes = (blocks / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, top).long().flatten(1)
    groups = torch.empty(inputs, dtype=torch.long)
    groups[order] = torch.arange(inputs) // group_size
    unordered = torch.empty_like(codes)
    unordered[:, order] = codes
    return QuantizedMatrix(unordered.numpy(), scales, zeros.long().numpy(), groups.numpy())


def words(fields: Integers, bits: int) -> torch.Tensor:
    """Pack rows of fields into rows of int32, the first field lowest; the last word is filled up with zeros."""
    each = 32 // bits
    padded = np.pad(fields, ((0, 0), (0, -fields.shape[1] % each))).reshape(len(fields), -1, each)
    packed = sum(padded[..., i].astype(np.uint32) << np.uint32(bits * i) for i in range(each))
    return torch.from_numpy(np.ascontiguousarray(packed, dtype=np.uint32).view(np.int32))


def awq(matrix: QuantizedMatrix) -> Tensors:
    def interleaved(fields: Integers) -> torch.Tensor:
        return words(fields.reshape(len(fields), -1, 8)[..., AWQ_ORDER].reshape(fields.shape), 4)

    return {
        "qweight": interleaved(matrix.codes.T),
        "qzeros": interleaved(matrix.zeros.T),
        "scales": matrix.scales.T.contiguous(),
    }


def gptq(matrix: QuantizedMatrix, *, bits: int, version: int) -> Tensors:
    zeros = words(matrix.zeros.T, bits)
    if version == 1:  # GPTQModel subtracts from whole words
        ones = sum(1 << i for i in range(0, 32, bits))
        zeros = torch.from_numpy((zeros.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    return {
        "qweight": words(matrix.codes, bits).T.contiguous(),
        "qzeros": zeros,
        "scales": matrix.scales.T.contiguous(),
        "g_idx": torch.from_numpy(matrix.groups).int(),
    }


def pack_quantized(matrix: QuantizedMatrix, *, bits: int, symmetric: bool, ordered: bool) -> Tensors:
    tensors = {
        "weight_packed": words(matrix.codes, bits),
        "weight_scale": matrix.scales.bfloat16() if bits == 4 else matrix.scales.clone(),
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(matrix.zeros.T, bits).T.contiguous()
    if ordered:
        tensors["weight_g_idx"] = torch.from_numpy(matrix.groups).int()
    return tensors


def int_quantized(matrix: QuantizedMatrix, *, symmetric: bool) -> Tensors:
    tensors = {
        "weight": torch.from_numpy(matrix.codes - 128).to(torch.int8),
        "weight_scale": matrix.scales.float(),
        "input_scale": torch.tensor([0.1]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy(matrix.zeros - 128).to(torch.int8)
    return tensors


def fp8(weight: torch.Tensor, *, block: tuple[int, int], name: str = "weight_scale") -> Tensors:
    """Round a matrix to float8_e4m3fn, with a scale for each block of outputs and inputs."""
    rows, columns = (min(length, size) for length, size in zip(weight.shape, block, strict=True))
    blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    stored = (blocks / scales).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
    return {"weight": stored, name: scales[:, 0, :, 0].contiguous()}


def compressed(stored: str, **weights: object) -> dict[str, object]:
    """Return the configuration of compressed-tensors with one scheme of weights."""
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "sparsity_config": {},
    }  # fmt: skip


class QuantizedCase(NamedTuple):
    section: dict[str, object]  # quantization_config
    bits: int
    group_size: int  # 0: a whole row
    write: Callable[[QuantizedMatrix], Tensors]
    symmetric: bool = True
    ordered: bool = False

    def random(self, out: int, inputs: int) -> QuantizedMatrix:
        group_size = self.group_size or inputs
        return random_matrix(out, inputs, self.bits, group_size, symmetric=self.symmetric, ordered=self.ordered)

    def quantize(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        """Return the tensors that stand for a matrix, and its values."""
        group_size = self.group_size or weight.shape[1]
        matrix = rounded(weight, self.bits, group_size, symmetric=self.symmetric, ordered=self.ordered)
        return self.write(matrix), matrix.values()


class Fp8Case(NamedTuple):
    section: dict[str, object]
    block: tuple[int, int]
    name: str = "weight_scale"

    def quantize(self, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors = fp8(weight, block=self.block, name=self.name)
        scales = tensors[self.name]
        for axis, length in enumerate(weight.shape):
            scales = scales.repeat_interleave(length // scales.shape[axis], axis)
        values = tensors["weight"].float() * scales
        if tensors[self.name].numel() == 1:
            tensors[self.name] = tensors[self.name].reshape(1)
        return tensors, values


def _gptq(
    bits: int, group_size: int, version: int, *, symmetric: bool = False, ordered: bool = False
) -> QuantizedCase:
    section = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size or -1, "sym": symmetric, "desc_act": ordered,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    return QuantizedCase(section, bits, group_size, partial(gptq, bits=bits, version=version), symmetric, ordered)


def _awq(group_size: int) -> QuantizedCase:
    section = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size or -1,
        "version": "gemm",
        "zero_point": True,
    }
    return QuantizedCase(section, 4, group_size, awq, symmetric=False)


def _packed(bits: int, group_size: int, *, symmetric: bool = True, ordered: bool = False) -> QuantizedCase:
    section = compressed(
        "pack-quantized", num_bits=bits, type="int", symmetric=symmetric, group_size=group_size or None,
        strategy="group" if group_size else "channel", actorder="group" if ordered else None,
    )  # fmt: skip
    write = partial(pack_quantized, bits=bits, symmetric=symmetric, ordered=ordered)
    return QuantizedCase(section, bits, group_size, write, symmetric, ordered)


def _int8(*, symmetric: bool) -> QuantizedCase:
    section = compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=symmetric)
    return QuantizedCase(section, 8, 0, partial(int_quantized, symmetric=symmetric), symmetric)


def _fp8(**section: object) -> dict[str, object]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **section}


WHOLE = 1 << 20
CASES: dict[str, QuantizedCase] = {
    "awq": _awq(64),
    "awq, whole rows": _awq(0),
    "gptq": _gptq(4, 32, 1),
    "gptq, symmetric": _gptq(4, 64, 1, symmetric=True),
    "gptq, version 2": _gptq(4, 64, 2),
    "gptq, 8 bits": _gptq(8, 64, 1),
    "gptq, whole rows": _gptq(4, 0, 1, symmetric=True),
    "pack-quantized": _packed(4, 64),
    "pack-quantized, asymmetric": _packed(4, 32, symmetric=False),
    "pack-quantized, 8 bits": _packed(8, 0),
    "int-quantized": _int8(symmetric=True),
    "int-quantized, asymmetric": _int8(symmetric=False),
}
ORDERED_CASES: dict[str, QuantizedCase] = {
    "gptq, act-order": _gptq(4, 64, 1, ordered=True),
    "gptq, act-order, 8 bits": _gptq(8, 32, 2, symmetric=True, ordered=True),
    "pack-quantized, act-order": _packed(4, 64, ordered=True),
    "gptq, small groups": _gptq(4, 16, 1),
}
FP8_CASES: dict[str, Fp8Case] = {
    "fp8, a scale for the tensor": Fp8Case(_fp8(), (WHOLE, WHOLE)),
    "fp8, blocks": Fp8Case(_fp8(weight_block_size=[32, 32]), (32, 32), "weight_scale_inv"),
    "fbgemm": Fp8Case({"quant_method": "fbgemm_fp8"}, (1, WHOLE)),
    "float-quantized": Fp8Case(
        compressed("float-quantized", type="float", num_bits=8, strategy="channel"), (1, WHOLE)
    ),
    "naive-quantized": Fp8Case(
        compressed("naive-quantized", type="float", num_bits=8, strategy="block", block_structure=[64, 32]), (64, 32)
    ),
}


def save_quantized_llama(folder: Path, case: QuantizedCase | Fp8Case) -> PreTrainedModel:
    """Save a Llama whose layers' matrices are quantised; return the model of their values in float32."""
    model = tiny_models.save(lambda: tiny_models.llama(intermediate_size=128), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stored, values = case.quantize(tensors.pop(name))
        tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in stored.items()}
        model.get_parameter(name).data.copy_(values)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, quantization_config=case.section)
    return model


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
