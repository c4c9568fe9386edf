from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.grouped_linear.reference import Bits, GroupedWeights
from tidewheel_kernels.kv_cache.reference import FP8
from tidewheel_kernels.penalties.reference import PenaltyTensors, TokenHistory, WordTensors
from tidewheel_kernels.sampling.reference import SamplingTensors
from tidewheel_kernels.switches import Switch

EARLY: frozenset[Switch] = frozenset({"dependent_launch"})
BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
VOCABULARY = 151_936


@dataclass(frozen=True)
class CompileCase:
    name: str
    call: Callable[[], object]
    may_spill: tuple[int, ...] = ()  # architectures that may spill
    default: bool = True
    least_arch: int = 0
    switches: frozenset[Switch] = frozenset()


def _rms_norm(hidden: int, dtype: torch.dtype, *, residual: bool) -> None:
    from tidewheel_kernels.norm.triton_kernels import rms_norm

    x = torch.empty(2, hidden, dtype=dtype)
    rms_norm(x, torch.empty(hidden, dtype=dtype), 1e-6, x.clone() if residual else None, 0.0)


def _silu_and_mul(size: int) -> None:
    from tidewheel_kernels.activation.triton_kernels import silu_and_mul

    silu_and_mul(torch.empty(2, 2 * size, dtype=BF16))


def _rope(head_dim: int, rotary_dim: int, *, norm: bool, num_kv_heads: int = 8, fp8: bool = False) -> None:
    from tidewheel_kernels.rope.triton_kernels import rope_and_cache

    qkv = torch.empty(2, 4 * num_kv_heads, head_dim, dtype=BF16)
    q, k, v = qkv[:, : 2 * num_kv_heads], qkv[:, 2 * num_kv_heads : -num_kv_heads], qkv[:, -num_kv_heads:]
    cache, scales = _cache(64, num_kv_heads, head_dim, BF16, fp8)
    weight = torch.empty(head_dim, dtype=BF16) if norm else None
    ids = torch.empty(2, dtype=I64)
    rope_and_cache(q, k, v, torch.empty(8, rotary_dim), ids, ids, cache, cache.clone(), weight, weight, 1e-6, scales)


def _cache(
    block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = (2, block_size, num_kv_heads, head_dim)
    return torch.empty(shape, dtype=FP8 if fp8 else dtype), torch.empty(2, num_kv_heads) if fp8 else None


def _kv_cache(*, fp8: bool = False) -> None:
    from tidewheel_kernels.kv_cache.triton_kernels import copy_blocks, write_kv_cache

    k = torch.empty(2, 8, 128, dtype=BF16)
    cache, scales = _cache(64, 8, 128, BF16, fp8)
    ids = torch.empty(2, dtype=I64)
    write_kv_cache(k, k.clone(), ids, cache, cache.clone(), scales)
    # The cache is kept as bytes.
    copy_blocks((cache.view(torch.uint8) if fp8 else cache).unsqueeze(0), ids, ids.clone())


def _quantize_rows(width: int) -> None:
    from tidewheel_kernels.scaled_linear.triton_kernels import quantize_rows

    quantize_rows(torch.empty(2, width, dtype=BF16))


def _int8_linear(out_features: int, in_features: int, *, bias: bool) -> None:
    from tidewheel_kernels.scaled_linear.triton_kernels import scaled_linear

    weight = torch.empty(out_features, in_features, dtype=torch.int8)
    scales, biases = torch.empty(2, out_features, 1, dtype=torch.float16)
    scaled_linear(torch.empty(2, in_features, dtype=BF16), weight, scales, biases.to(BF16) if bias else None)


def _linear(out_features: int, in_features: int, *, bias: bool = False, dtype: torch.dtype = BF16) -> None:
    from tidewheel_kernels.invariant_linear.triton_kernels import invariant_linear

    weight = torch.empty(out_features, in_features, dtype=dtype)
    invariant_linear(torch.empty(2, in_features, dtype=dtype), weight, weight[:, 0] if bias else None)


def _grouped_linear(
    num_rows: int,
    out_features: int,
    in_features: int,
    bits: Bits,
    *,
    group_size: int = 32,
    plain: bool = False,
    dtype: torch.dtype = BF16,
    codes_dtype: torch.dtype = torch.uint8,
) -> None:
    from tidewheel_kernels.grouped_linear.triton_kernels import grouped_linear

    codes = torch.empty(out_features, in_features * bits // 8, dtype=codes_dtype)
    scales = torch.empty(out_features, in_features // group_size, dtype=torch.float16)
    weights = GroupedWeights(codes, scales, None if plain else scales.clone(), bits)
    bias = None if plain else torch.empty(out_features, dtype=dtype)
    grouped_linear(torch.empty(num_rows, in_features, dtype=dtype), weights, bias)


def _lora(
    in_features: int, part_sizes: tuple[int, ...], max_rank: int, *, num_tiles: int = 8, dtype: torch.dtype = BF16
) -> None:
    from tidewheel_kernels.lora.groups import TILE, LoraGroups
    from tidewheel_kernels.lora.stacks import LoraSizes, StaticLoraStack
    from tidewheel_kernels.lora.triton_kernels import add_lora

    stack = StaticLoraStack(LoraSizes(in_features, part_sizes, 8, max_rank), dtype, torch.device("cpu"))
    groups = LoraGroups(torch.empty(num_tiles * TILE, dtype=I32), torch.empty(num_tiles, dtype=I32))
    x = torch.empty(2, in_features, dtype=dtype)
    add_lora(torch.empty(2, sum(part_sizes), dtype=dtype), x, stack, groups)


def _attention(
    head_dim: int,
    *,
    query_len: int,
    num_seqs: int = 2,
    group: int = 4,
    block_size: int = 64,
    dtype: torch.dtype = BF16,
    fp8: bool = False,
    num_kv_heads: int = 8,
    max_seq_len: int = 4096,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    invariant: bool = False,
) -> None:
    from tidewheel_kernels.attention.triton_kernels import invariant_attention, paged_attention

    q = torch.empty(num_seqs * query_len, group * num_kv_heads, head_dim, dtype=dtype)
    cache, scales = _cache(block_size, num_kv_heads, head_dim, dtype, fp8)
    meta = AttentionMetadata(
        slot_mapping=torch.empty(q.shape[0], dtype=I64),
        block_tables=torch.empty(num_seqs, max_seq_len // block_size, dtype=I32),
        cu_seqlens_q=torch.empty(num_seqs + 1, dtype=I32),
        seq_lens=torch.empty(num_seqs, dtype=I32),
        max_seqlen_q=query_len,
        max_seq_len=max_seq_len,
        num_decodes=num_seqs if query_len == 1 else 0,
    )
    attend = invariant_attention if invariant else paged_attention
    attend(q, cache, cache.clone(), meta, torch.empty_like(q), 0.1, sliding_window, soft_cap, scales)


_prefill = partial(_attention, query_len=256)
# Few programs, so that keys are split.
_split_decode = partial(_attention, query_len=1, num_kv_heads=1)
_plain_decode = partial(_attention, query_len=1, max_seq_len=64)
_invariant = partial(_attention, query_len=1, invariant=True)


def _sample(*, sampled: bool, dtype: torch.dtype = F32, vocabulary: int = VOCABULARY) -> None:
    from tidewheel_kernels.sampling.triton_kernels import sample

    column = torch.empty(2, dtype=F32)
    params = SamplingTensors(column, torch.empty(2, dtype=I32), column, column, sampled, sampled, sampled, sampled)
    sample(torch.empty(2, vocabulary, dtype=dtype), params, column)


def _logits_operations(num_rows: int, num_entries: int) -> None:
    from tidewheel_kernels.logprobs.triton_kernels import compute_logprobs
    from tidewheel_kernels.penalties.triton_kernels import apply_logit_bias, apply_penalties, forbid_words
    from tidewheel_kernels.token_mask.triton_kernels import apply_token_mask

    logits, column = torch.empty(num_rows, VOCABULARY), torch.empty(num_rows)
    ids, rows = torch.empty(num_entries, dtype=I32), torch.empty(num_rows, dtype=I32)
    history = TokenHistory(ids, torch.empty(num_rows, dtype=I64))
    apply_penalties(logits, history, PenaltyTensors(num_entries, rows, rows, rows, column, column, column))
    forbid_words(logits, history, WordTensors(ids, ids, ids, ids))
    apply_logit_bias(logits, ids, ids, torch.empty(num_entries))
    compute_logprobs(logits, torch.empty(num_rows, dtype=I64), 20)
    apply_token_mask(logits, rows, torch.empty(num_rows, VOCABULARY // 32 + 1, dtype=I32))


CASES = (
    CompileCase("rms_norm-1024", partial(_rms_norm, 1024, BF16, residual=True)),
    CompileCase("rms_norm-4096", partial(_rms_norm, 4096, BF16, residual=True), default=False),
    CompileCase("rms_norm-4096-plain", partial(_rms_norm, 4096, BF16, residual=False), default=False),
    CompileCase("rms_norm-8192-float32", partial(_rms_norm, 8192, F32, residual=True), default=False),
    CompileCase("silu_and_mul-3072", partial(_silu_and_mul, 3072)),
    CompileCase("rope-128-norm", partial(_rope, 128, 128, norm=True)),
    CompileCase("rope-128-norm-fp8", partial(_rope, 128, 128, norm=True, fp8=True), least_arch=89),
    CompileCase("rope-64", partial(_rope, 64, 64, norm=False), default=False),
    CompileCase("rope-80-partial", partial(_rope, 80, 32, norm=False), default=False),
    CompileCase("rope-128-norm-one-head", partial(_rope, 128, 128, norm=True, num_kv_heads=1), default=False),
    CompileCase("rms_norm-1024-early", partial(_rms_norm, 1024, BF16, residual=True), switches=EARLY),
    CompileCase(
        "rms_norm-4096-plain-early", partial(_rms_norm, 4096, BF16, residual=False), switches=EARLY, default=False
    ),
    CompileCase("silu_and_mul-3072-early", partial(_silu_and_mul, 3072), switches=EARLY),
    CompileCase("rope-128-norm-early", partial(_rope, 128, 128, norm=True), switches=EARLY),
    CompileCase("kv_cache", _kv_cache),
    CompileCase("kv_cache-fp8", partial(_kv_cache, fp8=True), least_arch=89),
    CompileCase("quantize_rows-1024", partial(_quantize_rows, 1024), least_arch=89),
    CompileCase("quantize_rows-14336", partial(_quantize_rows, 14336), least_arch=89, default=False),
    CompileCase("int8-1024-1024", partial(_int8_linear, 1024, 1024, bias=True)),
    CompileCase("int8-4096-14336", partial(_int8_linear, 4096, 14336, bias=False), default=False),
    CompileCase("linear-1024-3072", partial(_linear, 1024, 3072)),  # splits
    CompileCase("linear-28672-4096", partial(_linear, 28_672, 4096), default=False),
    CompileCase("linear-4608-3584-bias", partial(_linear, 4608, 3584, bias=True), default=False),
    CompileCase("linear-1024-3072-float32", partial(_linear, 1024, 3072, dtype=F32), may_spill=(80,), default=False),
    CompileCase("linear-300-112", partial(_linear, 300, 112), default=False),
    CompileCase("grouped-decode-4", partial(_grouped_linear, 8, 1024, 3072, 4)),  # splits
    CompileCase("grouped-decode-8-plain", partial(_grouped_linear, 8, 28_672, 4096, 8, plain=True)),
    CompileCase(
        "grouped-decode-4-of-128",
        partial(_grouped_linear, 8, 1024, 3072, 4, group_size=128, plain=True),
        may_spill=(100,),
    ),
    CompileCase(
        "grouped-decode-8-signed",
        partial(_grouped_linear, 8, 1024, 3072, 8, group_size=3072, plain=True, codes_dtype=torch.int8),
    ),
    CompileCase("grouped-decode-4-of-64", partial(_grouped_linear, 8, 576, 576, 4, group_size=64), default=False),
    CompileCase("grouped-decode-8", partial(_grouped_linear, 8, 1024, 3072, 8), default=False),
    CompileCase("grouped-prompt-4", partial(_grouped_linear, 512, 28_672, 4096, 4)),
    CompileCase("grouped-prompt-8-plain", partial(_grouped_linear, 512, 28_672, 4096, 8, plain=True)),
    CompileCase("grouped-prompt-4-of-128", partial(_grouped_linear, 512, 4096, 4096, 4, group_size=128, plain=True)),
    CompileCase("grouped-prompt-8-of-64", partial(_grouped_linear, 64, 1024, 1024, 8, group_size=64), default=False),
    CompileCase("grouped-float32", partial(_grouped_linear, 8, 1024, 1024, 4, dtype=F32), default=False),
    CompileCase("lora-qkv-16", partial(_lora, 4096, (4096, 1024, 1024), 16)),
    CompileCase("lora-gate-up-64", partial(_lora, 1024, (3072, 3072), 64)),
    CompileCase("lora-down-256", partial(_lora, 14_336, (4096,), 256)),
    CompileCase("lora-576-8", partial(_lora, 576, (576, 192, 192), 8, num_tiles=1), default=False),
    CompileCase("lora-1000-float16", partial(_lora, 1000, (300,), 20, dtype=torch.float16), default=False),
    CompileCase("lora-1024-64-float32", partial(_lora, 1024, (3072,), 64, dtype=F32), default=False),
    CompileCase("prefill-128", partial(_prefill, 128)),
    CompileCase(
        "prefill-128-one-of-each", partial(_prefill, 128, num_seqs=1, group=1, num_kv_heads=1), default=False
    ),
    CompileCase("prefill-64", partial(_prefill, 64), default=False),
    CompileCase("prefill-128-group-2", partial(_prefill, 128, group=2), default=False),
    CompileCase("prefill-128-group-7", partial(_prefill, 128, group=7), default=False),
    CompileCase("prefill-80", partial(_prefill, 80), default=False),
    CompileCase("prefill-96", partial(_prefill, 96), default=False),
    CompileCase("prefill-128-window", partial(_prefill, 128, sliding_window=1024), may_spill=(100,), default=False),
    CompileCase("prefill-128-soft-cap", partial(_prefill, 128, soft_cap=50.0), default=False),
    CompileCase("prefill-128-block-16", partial(_prefill, 128, block_size=16), default=False),
    CompileCase("prefill-128-block-32", partial(_prefill, 128, block_size=32), default=False),
    CompileCase("prefill-128-block-128", partial(_prefill, 128, block_size=128), default=False),
    CompileCase("prefill-256", partial(_prefill, 256), default=False),
    CompileCase("prefill-256-window-cap", partial(_prefill, 256, sliding_window=1024, soft_cap=50.0), default=False),
    CompileCase("prefill-128-fp8", partial(_prefill, 128, fp8=True), may_spill=(100,), least_arch=89),
    CompileCase("prefill-64-fp8", partial(_prefill, 64, fp8=True), least_arch=89, default=False),
    CompileCase("prefill-128-fp8-16", partial(_prefill, 128, block_size=16, fp8=True), least_arch=89, default=False),
    CompileCase("prefill-64-float32", partial(_prefill, 64, dtype=F32), default=False),
    CompileCase("prefill-128-float32", partial(_prefill, 128, dtype=F32), may_spill=(80, 90, 100), default=False),
    CompileCase("invariant-128", partial(_invariant, 128), may_spill=(100,)),
    CompileCase("invariant-64", partial(_invariant, 64), default=False),
    CompileCase("invariant-256", partial(_invariant, 256), default=False),
    CompileCase("invariant-128-window", partial(_invariant, 128, sliding_window=1024), default=False),
    CompileCase("invariant-128-soft-cap", partial(_invariant, 128, soft_cap=50.0), may_spill=(100,), default=False),
    CompileCase("invariant-128-block-16", partial(_invariant, 128, block_size=16), default=False),
    CompileCase(
        "invariant-128-fp8", partial(_invariant, 128, fp8=True), may_spill=(100,), least_arch=89, default=False
    ),
    CompileCase("invariant-64-float32", partial(_invariant, 64, dtype=F32), default=False),
    CompileCase("decode-128", partial(_plain_decode, 128)),
    CompileCase("decode-128-split", partial(_split_decode, 128)),
    CompileCase("decode-128-fp8", partial(_plain_decode, 128, fp8=True), least_arch=89),
    CompileCase("decode-128-split-fp8", partial(_split_decode, 128, fp8=True), least_arch=89),
    CompileCase("decode-64-split-fp8", partial(_split_decode, 64, fp8=True), least_arch=89, default=False),
    CompileCase(
        "decode-128-split-fp8-16",
        partial(_split_decode, 128, block_size=16, fp8=True),
        least_arch=89,
        default=False,
    ),
    CompileCase("decode-128-one-of-each", partial(_split_decode, 128, num_seqs=1, group=1), default=False),
    CompileCase("decode-64-split", partial(_split_decode, 64), default=False),
    CompileCase("decode-80-split", partial(_split_decode, 80), default=False),
    CompileCase("decode-128-split-group-7", partial(_split_decode, 128, group=7), default=False),
    CompileCase("decode-128-split-group-32", partial(_split_decode, 128, group=32), default=False),
    CompileCase("decode-128-split-window", partial(_split_decode, 128, sliding_window=1024), default=False),
    CompileCase("decode-128-split-soft-cap", partial(_split_decode, 128, soft_cap=50.0), default=False),
    CompileCase("decode-128-split-block-16", partial(_split_decode, 128, block_size=16), default=False),
    CompileCase("decode-128-split-block-128", partial(_split_decode, 128, block_size=128), default=False),
    CompileCase("decode-256-split", partial(_split_decode, 256), default=False),
    CompileCase("decode-128-split-float32", partial(_split_decode, 128, dtype=F32), default=False),
    CompileCase("sample", partial(_sample, sampled=True)),
    CompileCase("sample-bfloat16", partial(_sample, sampled=True, dtype=BF16), default=False),
    # Unaligned rows.
    CompileCase("sample-50257", partial(_sample, sampled=True, vocabulary=50_257), may_spill=(100,), default=False),
    CompileCase("sample-small", partial(_sample, sampled=True, vocabulary=300), default=False),
    CompileCase("greedy", partial(_sample, sampled=False)),
    CompileCase("greedy-bfloat16", partial(_sample, sampled=False, dtype=BF16), default=False),
    CompileCase("logits", partial(_logits_operations, 2, 300)),
    CompileCase("logits-one-of-each", partial(_logits_operations, 1, 1), default=False),
)
