"""All layers of a Llama-like decoder in one C call, for decode steps of few rows on a CPU.

Most operations of such a step take less time than a call from Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.choice import add_operation, preference_for
from tidewheel_kernels.decode_layers import structures
from tidewheel_kernels.grouped_linear import LaneWeights
from tidewheel_kernels.grouped_linear.reference import INPUT_GROUP
from tidewheel_kernels.kv_cache.codes import INT8, check_codes, scales_at
from tidewheel_kernels.lora import LoraGroups, LoraStack
from tidewheel_kernels.lora.cpu import empty_products, group_addresses, stack_address
from tidewheel_kernels.native.library import POINTER, NativeKernel, mixed_dtypes, native_library
from tidewheel_kernels.packed_linear import FEW_ROWS, PackedWeights

NAME = "decode_layers"
# The settings of products are in the layouts of weights.
REPLACED = ("rms_norm", "rope_and_cache", "paged_attention", "silu_and_mul")
add_operation(NAME)
_decode_layers = NativeKernel(NAME, POINTER)

# With more rows, operations of their own are faster (benchmarks/engine/cpu_kernels.py); from 32 on they may use AMX.
FEW_GROUPED_ROWS = 16
MAX_HEAD_DIM = 256
# Begins with keys and values [num_blocks, block_size, num_kv_heads, head_dim].
LayerCache = Sequence[torch.Tensor | None]


class LinearWeights(NamedTuple):
    weights: PackedWeights | LaneWeights
    bias: torch.Tensor | None  # [out_features]


class LayerWeights(NamedTuple):
    input_norm: torch.Tensor  # [hidden]
    mlp_norm: torch.Tensor  # [hidden]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    qkv: LinearWeights
    output: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights
    sliding_window: int  # 0: every key is seen

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        return self.qkv, self.output, self.gate_up, self.down


class HeadShape(NamedTuple):
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


def fits_decode_layers(layers: Sequence[LayerWeights], heads: HeadShape) -> bool:
    """Return whether C kernels know all layouts and are allowed."""
    known = all(linear.weights.address for layer in layers for linear in layer.linears)
    allowed = all(preference_for(name) == "auto" for name in (NAME, *REPLACED))
    return (
        allowed
        and native_library(layers[0].input_norm.dtype) is not None
        and known
        and heads.head_dim <= MAX_HEAD_DIM
    )


class DecodeLayers:
    """Layers that `fits_decode_layers` accepts, by address: their weights must not move. One step runs at a time."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        heads: HeadShape,
        cos_sin: torch.Tensor,  # [max_position, rotary_dim] float32, cat(cos, sin)
        eps: float,
    ) -> None:
        first = layers[0]
        self.dtype = first.input_norm.dtype
        self._head_places = heads.num_kv_heads, heads.head_dim
        is_grouped = any(isinstance(linear.weights, LaneWeights) for layer in layers for linear in layer.linears)
        self.max_rows = FEW_GROUPED_ROWS if is_grouped else FEW_ROWS[self.dtype]
        self._layers = (structures.LayerAddresses * len(layers))(*map(_layer_addresses, layers))
        self._decoder = structures.DecoderAddresses(
            ctypes.addressof(self._layers), cos_sin.data_ptr(), len(layers), first.down.weights.out_features,
            first.down.weights.in_features, *heads, cos_sin.shape[1] // 2, eps, heads.head_dim**-0.5,
        )  # fmt: skip
        self._step = structures.StepAddresses(model=ctypes.addressof(self._decoder))
        self._buffers = self._allocate(first)
        self._kept = layers, cos_sin
        self._caches: Sequence[LayerCache] = ()
        self.takes_lora = False

    def _allocate(self, layer: LayerWeights) -> dict[str, torch.Tensor]:
        """Allocate buffers between stages."""
        rows = self.max_rows
        inputs = max(linear.weights.in_features for linear in layer.linears)
        widths = {
            "normed": layer.qkv.weights.in_features,
            "heads": layer.qkv.weights.out_features,
            "attended": layer.output.weights.in_features,
            "gate_up": layer.gate_up.weights.out_features,
            "activated": layer.down.weights.in_features,
        }
        buffers = {name: torch.empty(rows, width, dtype=self.dtype) for name, width in widths.items()}
        num_groups = rows * -(-inputs // INPUT_GROUP)
        buffers |= {name: torch.empty(num_groups) for name in ("scales", "sums")}
        buffers["starts"] = torch.empty(num_groups, dtype=torch.int32)
        buffers["codes"] = torch.empty(num_groups * INPUT_GROUP, dtype=torch.int16)
        for name, tensor in buffers.items():
            setattr(self._step, name, tensor.data_ptr())
        return buffers

    def use_lora(self, stacks: Sequence[LoraStack | None]) -> None:
        """Bind the stacks of each layer's qkv, output, gate_up and down, in order of layers; None: no adapters.

        Sets `takes_lora`: whether the C kernel can read all of them.
        """
        addresses = [None if stack is None else stack_address(stack, self.dtype) for stack in stacks]
        self.takes_lora = all(
            stack is None or address is not None for stack, address in zip(stacks, addresses, strict=True)
        )
        pointers = (ctypes.c_void_p * (len(self._layers) * structures.LINEARS))(*addresses)
        self._step.lora_stacks = ctypes.addressof(pointers)
        self._kept_lora = stacks, pointers
        self._lora_width = max((stack.width for stack in stacks if stack is not None), default=0)

    def run(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        caches: Sequence[LayerCache],
        lora_groups: LoraGroups | None = None,
    ) -> torch.Tensor:
        """Replace `x` [T, hidden], embeddings of at most `max_rows` decodes, by the last layer's output.

        Decodes may be successive tokens of one sequence, adjacent and in order. Return the residual [T, hidden].
        `positions` are [T] int64. `lora_groups`, with `takes_lora` alone: rows with adapters.
        """
        if caches is not self._caches:
            self._use_caches(caches)
        residual, tables, step = torch.empty_like(x), meta.block_tables, self._step
        step.positions, step.slots = positions.data_ptr(), meta.slot_mapping.data_ptr()
        step.tables, step.table_stride = tables.data_ptr(), tables.stride(0)
        step.seq_lens, step.num_rows = meta.seq_lens.data_ptr(), x.shape[0]
        step.x, step.residual, step.num_threads = x.data_ptr(), residual.data_ptr(), torch.get_num_threads()
        step.lora_groups = None
        if lora_groups is not None:
            addresses, products = group_addresses(lora_groups), empty_products(lora_groups, self._lora_width)
            step.lora_groups, step.lora_products = ctypes.addressof(addresses), products.data_ptr()
        _decode_layers[self.dtype](ctypes.addressof(step))
        return residual

    def _use_caches(self, caches: Sequence[LayerCache]) -> None:
        pairs = [(keys, values) for keys, values, *_ in caches if keys is not None and values is not None]
        places = {(keys.shape[1:], keys.stride(), values.stride()) for keys, values in pairs}
        if len(pairs) != len(self._layers) or len(places) > 1 or pairs[0][0].shape[2:] != self._head_places:
            shapes = [list(keys.shape) for keys, _ in pairs]
            raise ValueError(
                f"{len(self._layers)} layers need caches of one layout with {list(self._head_places)} heads and "
                f"elements, got {shapes}"
            )
        expected = INT8 if pairs[0][0].dtype == INT8 else self.dtype
        for cache in (cache for pair in pairs for cache in pair):
            if cache.dtype != expected:
                raise mixed_dtypes(expected, cache)
            check_codes(cache)
        addresses = [structures.CacheAddresses(keys.data_ptr(), values.data_ptr()) for keys, values in pairs]
        self._addresses = (structures.CacheAddresses * len(pairs))(*addresses)
        keys, values = pairs[0]
        step = self._step
        step.caches, step.block_size = ctypes.addressof(self._addresses), keys.shape[1]
        step.scales_at = scales_at(keys)
        step.k_block_stride, step.v_block_stride = keys.stride(0), values.stride(0)
        self._caches = caches


def _layer_addresses(layer: LayerWeights) -> structures.LayerAddresses:
    norms = (None if norm is None else norm.data_ptr() for norm in layer[:4])
    linears = tuple(map(_linear_addresses, layer.linears))
    return structures.LayerAddresses(*norms, linears, layer.sliding_window)


def _linear_addresses(linear: LinearWeights) -> structures.LinearAddresses:
    weights, bias = linear
    is_grouped = isinstance(weights, LaneWeights)
    return structures.LinearAddresses(
        grouped=weights.address if is_grouped else None,
        blocked=None if is_grouped else weights.address,
        bias=None if bias is None else bias.data_ptr(),
    )
