"""Block sizes, warps and pipeline stages of all launches; docs/kernels.md has the reasons.

Attention tiles are the largest that spill no registers; float32 prefill with head_dim 128 does spill.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tidewheel_kernels.switches import is_on

# With fewer, the merge costs too much.
MIN_KEYS_PER_SPLIT = 128
MIN_KEYS_PER_SPLIT_OF_MANY = 1024  # where sequences fill the device
# Two decode programs hide each other's latency.
PROGRAMS_PER_SM = 2
RESIDENT_PROGRAMS_PER_SM = 3
# One-warp programs; 32 run at once.
VOCABULARY_PROGRAMS_PER_SM = 128
MIN_DOT_SIZE = 16  # of tl.dot
# Per tile of rows on any device, so that sums follow from the matrix.
LINEAR_PROGRAMS = 128
MIN_INPUTS_PER_SPLIT = 512
MAX_LINEAR_SPLITS = 8
GROUPED_PROGRAMS = 264  # two for each of 132 multiprocessors
MIN_GROUPED_INPUTS = 256  # per split
# For three resident programs of four warps; conversion of 8-bit floats takes ten more.
FP8_REGISTERS = 168
# Warpgroup instructions read keys from shared memory, which leaves registers for larger tiles.
WARPGROUP_ARCHITECTURES = (90, 100, 103)
# Bytes, below which triton-lang 3.8 and 3.9 clear a bit of tensor descriptors.
SMALL_TENSOR = 128 * 1024
# Architecture for tensors off the GPU.
compile_target: ContextVar[int] = ContextVar("compile_target", default=90)


class LaunchConfig(NamedTuple):
    block: int  # elements or rows per program
    num_warps: int
    num_stages: int = 1


class AttentionConfig(NamedTuple):
    block_m: int  # query tokens x query heads of one KV head
    block_n: int  # keys; divides the KV block
    block_d: int  # power of two
    num_warps: int
    num_stages: int
    tma: bool = False  # tensor memory accelerator
    max_registers: int | None = None


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@lru_cache
def row_config(size: int) -> LaunchConfig:
    """Return a program per row, 16 elements per thread."""
    block = max(next_power_of_2(size), 32)
    return LaunchConfig(block, num_warps=min(max(block // 512, 1), 16))


@lru_cache
def elementwise_config(size: int) -> LaunchConfig:
    block = min(max(next_power_of_2(size), 32), 1024)
    return LaunchConfig(block, num_warps=min(max(block // 256, 1), 4))


class VocabularyConfig(NamedTuple):
    """Split of a row of logits among programs, by vocabulary size alone: no token depends on its batch."""

    chunk: int  # logits per partial result
    num_chunks: int
    tile: int  # chunks read at once by the first launch
    num_tiles: int
    block: int  # logits read at once by the second; a multiple of `chunk`
    capacity: int  # candidates in registers
    num_warps: int  # one needs no barrier
    row_warps: int  # in the second launch


@lru_cache
def vocabulary_config(vocabulary: int) -> VocabularyConfig:
    chunk, tile = 512, 2
    num_chunks = cdiv(vocabulary, chunk)
    block = chunk * min(next_power_of_2(num_chunks), 16)
    return VocabularyConfig(
        chunk=chunk,
        num_chunks=num_chunks,
        tile=tile,
        num_tiles=cdiv(num_chunks, tile),
        block=block,
        capacity=min(block, 4096),
        num_warps=1,
        row_warps=min(max(block // 512, 4), 16),
    )


def vocabulary_programs(num_rows: int, num_tiles: int, num_sms: int) -> int:
    """Return the programs that split a row in the first launch; small ones end together."""
    wanted = cdiv(VOCABULARY_PROGRAMS_PER_SM * num_sms, max(num_rows, 1))
    tiles = cdiv(num_tiles, min(wanted, num_tiles))
    return cdiv(num_tiles, tiles)


def copy_config(size: int) -> LaunchConfig:
    """Return 32 elements per thread: four loads of 16 bytes before the first store."""
    block = min(max(next_power_of_2(size), 32), 4096)
    return LaunchConfig(block, num_warps=min(max(block // 1024, 1), 4))


@lru_cache
def rope_config(num_heads: int) -> LaunchConfig:
    return LaunchConfig(min(next_power_of_2(num_heads), 8), num_warps=2)


@lru_cache
def prefill_config(
    head_dim: int, group: int, block_size: int, element_size: int, architecture: int, *, fp8: bool = False
) -> AttentionConfig:
    block_d = max(next_power_of_2(head_dim), MIN_DOT_SIZE)
    # Heads of 256 spill on sm_100.
    boxes = architecture == 90 or (block_d <= 128 and architecture in WARPGROUP_ARCHITECTURES)
    tma = boxes and element_size == 2 and block_size >= 64 and (head_dim % 16 == 0 or not fp8)  # strides in 16 bytes
    if element_size > 2:
        block_m, block_n, num_warps, num_stages = 32, 32, 8, 1
    elif block_d > 128:
        block_m, block_n, num_warps, num_stages = 64, 32, 8, 2
    elif block_size == 16:
        block_m, block_n, num_warps, num_stages = 64, 16, 4, 2
    elif tma:
        block_m, block_n, num_warps, num_stages = 128, 64, 8, 3 if architecture == 90 else 2
    elif block_d > 64:
        block_m, block_n, num_warps, num_stages = 128, 32, 8, 3
    else:
        block_m, block_n, num_warps, num_stages = 128, 64, 8, 2
    block_m = max(block_m, next_power_of_2(group))
    return AttentionConfig(block_m, min(block_n, block_size), block_d, num_warps, num_stages, tma)


def declared_blocks(shape: Sequence[int], strides: Sequence[int], element_size: int) -> int:
    """Return the blocks to declare in a TMA descriptor: `shape[0]`, or more for some tensors over 2 GiB.

    triton-lang 3.8 and 3.9 count bytes in signed 32 bits, and take these for small. Loads stay within the real
    blocks.
    """
    last_byte = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) * element_size
    wrapped, overflow = last_byte % 2**32, 2**31 - 1
    if last_byte < overflow or SMALL_TENSOR <= wrapped < overflow:
        return shape[0]
    missing = (SMALL_TENSOR - wrapped) % 2**32
    return shape[0] + cdiv(missing, strides[0] * element_size)


@lru_cache
def decode_config(
    head_dim: int, group: int, block_size: int, element_size: int, *, fp8: bool = False
) -> AttentionConfig:
    """Return small tiles, with the next in flight: decodes wait for memory."""
    block_d = max(next_power_of_2(head_dim), MIN_DOT_SIZE)
    block_m = max(next_power_of_2(group), MIN_DOT_SIZE)
    if element_size > 2:
        return AttentionConfig(block_m, min(32, block_size), block_d, num_warps=8, num_stages=2)
    block_n = min(32 if block_d > 128 else 64, block_size)
    is_limited = fp8 and head_dim % 16 == 0 and (block_m, block_n, block_d) == (MIN_DOT_SIZE, 64, 128)
    limit = FP8_REGISTERS if is_limited else None
    return AttentionConfig(block_m, block_n, block_d, num_warps=4, num_stages=3, max_registers=limit)


class LinearConfig(NamedTuple):
    """Tiles and splits of a matrix product, by the matrix alone: no row depends on its batch."""

    block_m: int  # rows
    block_n: int  # outputs
    block_k: int  # inputs
    num_splits: int  # of the inputs
    split_len: int  # multiple of block_k
    num_warps: int
    num_stages: int


@lru_cache
def linear_config(out_features: int, in_features: int, element_size: int) -> LinearConfig:
    """Return tiles for prompts, and splits with which one tile of rows fills a large device."""
    if element_size > 2:
        block_m, block_n, block_k, num_warps, num_stages = 32, 64, 16, 4, 2
    else:
        block_m, block_n, block_k, num_warps, num_stages = 128, 128, 64, 8, 3
    wanted = cdiv(LINEAR_PROGRAMS, cdiv(out_features, block_n))
    num_splits = max(min(wanted, in_features // MIN_INPUTS_PER_SPLIT, MAX_LINEAR_SPLITS), 1)
    split_len = cdiv(cdiv(in_features, num_splits), block_k) * block_k
    return LinearConfig(block_m, block_n, block_k, cdiv(in_features, split_len), split_len, num_warps, num_stages)


@lru_cache(4096)
def grouped_config(num_rows: int, out_features: int, in_features: int, element_size: int) -> LinearConfig:
    """Return tiles for weights of 4 and 8 bits, small ones for decodes, and splits."""
    if element_size > 2:
        block_m, block_n, block_k, num_warps, num_stages = 16, 64, 32, 4, 2
    elif num_rows <= MIN_DOT_SIZE:
        block_m, block_n, block_k, num_warps, num_stages = 16, 64, 128, 4, 4
    else:
        block_m, block_n, block_k, num_warps, num_stages = 64, 128, 64, 8, 3
    num_tiles = cdiv(num_rows, block_m) * cdiv(out_features, block_n)
    wanted = min(GROUPED_PROGRAMS // num_tiles, in_features // MIN_GROUPED_INPUTS, MAX_LINEAR_SPLITS)
    num_splits = next_power_of_2(wanted + 1) // 2 if wanted > 1 else 1
    split_len = cdiv(cdiv(in_features, num_splits), block_k) * block_k
    return LinearConfig(block_m, block_n, block_k, cdiv(in_features, split_len), split_len, num_warps, num_stages)


class LowRankConfig(NamedTuple):
    """Tiles of the kernels of adapters, chosen by the layer alone, so that no row depends on its batch."""

    block_r: int  # ranks
    block_k: int  # inputs
    block_n: int  # outputs
    ranks: int  # of all adapters, a multiple of block_r
    num_splits: int  # of the inputs
    split_len: int  # multiple of block_k
    num_warps: int
    num_stages: int


@lru_cache
def lora_config(in_features: int, max_rank: int, element_size: int) -> LowRankConfig:
    """Return small, pipelined tiles: in a decode step nearly every tile reads another adapter."""
    block_r = min(max(next_power_of_2(max_rank), MIN_DOT_SIZE), 32 if element_size > 2 else 64)
    block_k, num_stages = (32, 2) if element_size > 2 else (128, 4)
    num_splits = max(min(in_features // MIN_INPUTS_PER_SPLIT, MAX_LINEAR_SPLITS), 1)
    split_len = cdiv(cdiv(in_features, num_splits), block_k) * block_k
    return LowRankConfig(
        block_r=block_r,
        block_k=block_k,
        block_n=64 if element_size > 2 else 128,
        ranks=cdiv(max_rank, block_r) * block_r,
        num_splits=cdiv(in_features, split_len),
        split_len=split_len,
        num_warps=4,
        num_stages=num_stages,
    )


class DecodeSplits(NamedTuple):
    extra: int  # programs per KV head beyond one per sequence
    min_keys: int  # per split


@lru_cache
def decode_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> DecodeSplits:
    """Return extra programs and keys per split, from host values: CUDA graphs freeze both."""
    wanted, resident = (
        cdiv(PROGRAMS_PER_SM * num_sms, num_kv_heads),
        RESIDENT_PROGRAMS_PER_SM * num_sms // num_kv_heads,
    )
    min_keys = MIN_KEYS_PER_SPLIT if num_seqs < wanted else MIN_KEYS_PER_SPLIT_OF_MANY
    # Sequences of one length are not split once they fill the device: a share is twice the mean.
    extra = min(wanted, max(resident - num_seqs, num_seqs // 2))
    return DecodeSplits(min(extra, num_seqs * (cdiv(max(max_seq_len, 1), min_keys) - 1)), min_keys)


def splits_none(seq_lens: npt.NDArray[np.int32], limits: DecodeSplits) -> bool:
    """Return whether `limits` let no decode be split."""
    longest = int(seq_lens.max())
    return longest <= limits.min_keys or longest * limits.extra <= int(seq_lens.sum())


@lru_cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def architecture(device: torch.device) -> int:
    return _capability(device) if device.type == "cuda" else compile_target.get()


def starts_early(device: torch.device) -> bool:
    """Return whether small kernels start before the previous ends (programmatic dependent launch)."""
    return is_on("dependent_launch") and architecture(device) >= 90


@lru_cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
