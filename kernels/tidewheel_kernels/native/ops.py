"""Launchers of the C kernels; their arguments are described in the C sources."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tidewheel_kernels.attention_cpu import paged_attention_cpu
from tidewheel_kernels.metadata import AttentionMetadata
from tidewheel_kernels.native.library import native_library

# A row takes about a microsecond, as does waking a thread.
MIN_ROWS_TO_SHARE = 4

_pointer, _long, _float, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32


class _Kernel:
    """Library function with its argument types."""

    def __init__(self, name: str, *types: Any) -> None:
        self._name = name
        self._types = types
        self._functions: dict[torch.dtype, Callable[..., None]] = {}

    def of(self, dtype: torch.dtype) -> Callable[..., None]:
        function = self._functions.get(dtype)
        if function is None:
            library = native_library(dtype)
            assert library is not None, f"no native kernels for {dtype}"
            function = getattr(library, self._name)
            function.argtypes, function.restype = self._types, None
            self._functions[dtype] = function
        return function


_rms_norm = _Kernel("rms_norm", *[_pointer] * 5, *[_long] * 4, _float, _float, _int)
_silu_and_mul = _Kernel("silu_and_mul", *[_pointer] * 2, *[_long] * 3, _int)
_rope_and_cache = _Kernel("rope_and_cache", *[_pointer] * 10, *[_long] * 14, _float, _int)
_decode_attention = _Kernel("decode_attention", *[_pointer] * 6, *[_long] * 11, _float, _float, _int)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    weight_offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = x.shape
    normed = torch.empty(num_rows, width, dtype=x.dtype)
    total = None if residual is None else torch.empty(num_rows, width, dtype=x.dtype)
    _rms_norm.of(x.dtype)(
        x.data_ptr(), _address(residual, x), _address(weight, x), normed.data_ptr(), _address(total, x), num_rows,
        width, x.stride(0), 0 if residual is None else residual.stride(0), eps, weight_offset, _num_threads(num_rows),
    )  # fmt: skip
    return normed if total is None else (normed, total)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype)
    _silu_and_mul.of(gate_up.dtype)(
        gate_up.data_ptr(), out.data_ptr(), num_rows, width, gate_up.stride(0), _num_threads(num_rows)
    )
    return out


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    num_tokens, num_q_heads, head_dim = q.shape
    positions = positions.long()
    _rope_and_cache.of(q.dtype)(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), cos_sin_cache.data_ptr(), positions.data_ptr(),
        slot_mapping.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), _address(q_norm_weight, q),
        _address(k_norm_weight, q), num_tokens, num_q_heads, k.shape[1], head_dim, cos_sin_cache.shape[-1] // 2,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], k_cache.shape[1], k_cache.stride(0), v_cache.stride(0),
        eps, _num_threads(num_tokens),
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> None:
    """Run decodes in C, and prompts, which are large products, in torch's own attention."""
    _, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    if meta.num_decodes:
        _decode_attention.of(q.dtype)(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), meta.block_tables.data_ptr(),
            meta.seq_lens.data_ptr(), out.data_ptr(), meta.num_decodes, num_kv_heads, num_q_heads // num_kv_heads,
            head_dim, block_size, *q.stride()[:2], k_cache.stride(0), v_cache.stride(0),
            meta.block_tables.stride(0), sliding_window, scale, soft_cap, torch.get_num_threads(),
        )  # fmt: skip
    first = meta.num_decodes
    if first < meta.num_seqs:
        paged_attention_cpu(q, k_cache, v_cache, meta, out, scale, sliding_window, soft_cap, first_seq=first)


def _address(tensor: torch.Tensor | None, like: torch.Tensor) -> int | None:
    """Raise `TypeError` if the kernel would read elements of another size."""
    if tensor is None:
        return None
    if tensor.dtype != like.dtype:
        raise TypeError(f"a native kernel for {like.dtype} was given {tensor.dtype}: convert it")
    return tensor.data_ptr()


def _num_threads(num_rows: int) -> int:
    return torch.get_num_threads() if num_rows >= MIN_ROWS_TO_SHARE else 1
