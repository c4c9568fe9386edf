"""Structures `Linear`, `Layer`, `Cache`, `Decoder` and `Step` of native/decode_layers.c."""

from __future__ import annotations

import ctypes

LINEARS = 4  # of a layer: qkv, output, gate_up and down


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


def _longs(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


class LinearAddresses(ctypes.Structure):
    _fields_ = _pointers("grouped", "blocked", "bias")


class LayerAddresses(ctypes.Structure):
    _fields_ = (
        *_pointers("input_norm", "mlp_norm", "q_norm", "k_norm"),
        ("linears", LinearAddresses * LINEARS),
        *_longs("sliding_window"),
    )


class CacheAddresses(ctypes.Structure):
    _fields_ = _pointers("keys", "values")


class DecoderAddresses(ctypes.Structure):
    _fields_ = (
        *_pointers("layers", "cos_sin"),
        *_longs("num_layers", "hidden", "intermediate", "num_q_heads", "num_kv_heads", "head_dim", "half"),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class StepAddresses(ctypes.Structure):
    _fields_ = (
        *_pointers("model", "caches", "positions", "slots", "tables", "seq_lens", "x", "residual"),
        *_pointers("normed", "heads", "attended", "gate_up", "activated", "codes", "scales", "sums", "starts"),
        *_pointers("lora_groups", "lora_stacks", "lora_products"),
        *_longs("num_rows", "table_stride", "block_size", "scales_at", "k_block_stride", "v_block_stride"),
        ("num_threads", ctypes.c_int32),
    )
