from __future__ import annotations

import torch

from tidewheel_kernels.attention.cpu import paged_attention_cpu
from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.attention.reference import paged_attention_reference
from tidewheel_kernels.choice import Op
from tidewheel_kernels.kv_cache.codes import INT8, check_codes, scales_at
from tidewheel_kernels.kv_cache.reference import FP8
from tidewheel_kernels.native.library import FLOAT, LONG, POINTER, THREADS, NativeKernel

MAX_HEAD_DIM = 256
BLOCK_SIZES = (16, 32, 64, 128)
_decode_attention = NativeKernel("decode_attention", *[POINTER] * 6, *[LONG] * 12, FLOAT, FLOAT, THREADS)
_prompt_attention = NativeKernel("prompt_attention", *[POINTER] * 7, *[LONG] * 14, FLOAT, FLOAT, THREADS)
MAX_GROUP = 256  # MAX_ROWS of native/prompt_attention.c


def paged_attention(
    q: torch.Tensor,  # [num_tokens, num_q_heads, head_dim], last dimension contiguous
    k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,  # like k_cache
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    out: torch.Tensor | None = None,  # like q, contiguous
    scales: torch.Tensor | None = None,  # as `kv_cache` says
    invariant: bool = False,
) -> torch.Tensor:
    """Return causal attention [num_tokens, num_q_heads, head_dim] in q's dtype; softmax in float32.

    A query at position p sees keys at positions <= p, with ``sliding_window = W > 0`` only those > p - W. A
    ``soft_cap`` c > 0 replaces each scaled logit s by ``c * tanh(s / c)``. Query head ``h`` reads KV head ``h //
    (num_q_heads // num_kv_heads)``. With ``invariant``, the triton-lang kernel gives a query bitwise the result of a
    decode, in any chunk and batch.
    """
    _check(q, k_cache, v_cache, scale, sliding_window, soft_cap, scales)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.shape[0]:
        op = _INVARIANT if invariant else _OP
        op.chosen[q.device, q.dtype](q, k_cache, v_cache, meta, out, scale, sliding_window, soft_cap, scales)
    return out


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    scales: torch.Tensor | None,
) -> None:
    num_q_heads, head_dim = q.shape[1], q.shape[2]
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    if k_cache.shape != v_cache.shape or k_cache.shape[3] != head_dim:
        raise ValueError(
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} do not fit"
        )
    expected = FP8 if scales is not None else INT8 if k_cache.dtype == INT8 else q.dtype
    if expected != k_cache.dtype or expected != v_cache.dtype:
        raise TypeError(
            f"q is {q.dtype}, k_cache {k_cache.dtype} and v_cache {v_cache.dtype}; they must be of one dtype, "
            f"or the caches {INT8}, or {FP8} with scales"
        )
    check_codes(k_cache)
    check_codes(v_cache)
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads {num_q_heads} is not a multiple of num_kv_heads {num_kv_heads}")
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, got {block_size}")
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if sliding_window < 0 or soft_cap < 0:
        raise ValueError(f"sliding_window {sliding_window} and soft_cap {soft_cap} must not be negative; 0 is off")


def paged_attention_native(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    scales: torch.Tensor | None,
) -> None:
    """Compute attention in C; in torch with `scales` or over `MAX_GROUP` query heads per KV head."""
    if scales is not None or q.shape[1] > MAX_GROUP * k_cache.shape[2]:
        paged_attention_cpu(q, k_cache, v_cache, meta, out, scale, sliding_window, soft_cap, scales)
        return
    _, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    places = block_size, scales_at(k_cache)
    strides = *q.stride()[:2], k_cache.stride(0), v_cache.stride(0), meta.block_tables.stride(0)
    heads = num_kv_heads, num_q_heads // num_kv_heads, head_dim
    num_seqs = meta.seq_lens.shape[0]
    if meta.num_decodes:
        _decode_attention[q.dtype](
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), meta.block_tables.data_ptr(),
            meta.seq_lens.data_ptr(), out.data_ptr(), meta.num_decodes, *heads, *places, *strides, sliding_window,
            scale, soft_cap, torch.get_num_threads(),
        )  # fmt: skip
    if meta.num_decodes < num_seqs:
        _prompt_attention[q.dtype](
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), meta.block_tables.data_ptr(),
            meta.cu_seqlens_q.data_ptr(), meta.seq_lens.data_ptr(), out.data_ptr(), meta.num_decodes, num_seqs,
            *heads, *places, *strides, meta.max_seqlen_q, sliding_window, scale, soft_cap, torch.get_num_threads(),
        )  # fmt: skip


_OP = Op(
    "paged_attention",
    __name__,
    reference=paged_attention_reference,
    cpu=paged_attention_cpu,
    native=paged_attention_native,
    has_flash=True,
)
_INVARIANT = Op("invariant_attention", __name__, reference=paged_attention_reference)
