"""Recorded launch configurations: block sizes, warps and pipeline stages. Nothing is tuned at run time.

Attention tiles are the largest without register spills on sm_80, sm_90 and sm_100, except float32 prefill with
head_dim 128, which spills a little; see ``python -m tidewheel_kernels.aot --all``.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch

# Least keys per decode program, so that merging partial results stays cheap.
MIN_KEYS_PER_SPLIT = 128
# Decode programs per multiprocessor: two hide each other's latency; three fit.
PROGRAMS_PER_SM = 2
RESIDENT_PROGRAMS_PER_SM = 3
# One-warp programs per multiprocessor that read logits; 32 run at once.
VOCABULARY_PROGRAMS_PER_SM = 128
# Least size of a tl.dot dimension.
MIN_DOT_SIZE = 16
# tl.dot becomes warpgroup instructions that read keys from shared memory: registers for larger tiles.
WARPGROUP_ARCHITECTURES = (90, 100, 103)
# Architecture of launches on tensors off the GPU; set for ahead-of-time compilation.
compile_target: ContextVar[int] = ContextVar("compile_target", default=90)


class LaunchConfig(NamedTuple):
    """`block`: elements or rows per program."""

    block: int
    num_warps: int
    num_stages: int = 1


class AttentionConfig(NamedTuple):
    block_m: int  # rows: query tokens x query heads of one KV head
    block_n: int  # keys per tile; divides the KV block
    block_d: int  # head_dim rounded up to a power of two
    num_warps: int
    num_stages: int
    tma: bool = False  # tensor memory accelerator copies keys and values


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def row_config(size: int) -> LaunchConfig:
    """Give each row of `size` elements one program, in registers: 16 elements per thread, up to 16 warps."""
    block = max(next_power_of_2(size), 32)
    return LaunchConfig(block, num_warps=min(max(block // 512, 1), 16))


def elementwise_config(size: int) -> LaunchConfig:
    block = min(max(next_power_of_2(size), 32), 1024)
    return LaunchConfig(block, num_warps=min(max(block // 256, 1), 4))


class VocabularyConfig(NamedTuple):
    """Partition of a row of logits; docs/kernels.md, "Sampling", has the reasons.

    `chunk` and `tile` depend only on the vocabulary. Partial results are stored by chunk, so neither they nor a row's
    token depend on the programs per row or the batch.
    """

    chunk: int  # logits per partial result
    num_chunks: int
    tile: int  # chunks that a program of the first launch reads at once
    num_tiles: int
    block: int  # logits that a row's program, in the second launch, reads at once; a multiple of `chunk`
    capacity: int  # candidates that a row's program holds in registers
    num_warps: int  # of the first launch: one, which reduces a chunk without a barrier
    row_warps: int  # of the second launch


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
    """Return the number of programs per row in the first launch: short ones, so that the last take little time.

    Depends on host values only, like `num_kv_splits`.
    """
    wanted = cdiv(VOCABULARY_PROGRAMS_PER_SM * num_sms, max(num_rows, 1))
    tiles = cdiv(num_tiles, min(wanted, num_tiles))
    return cdiv(num_tiles, tiles)


def copy_config(size: int) -> LaunchConfig:
    """Give each thread 32 elements: four loads of 16 bytes in flight before the first store."""
    block = min(max(next_power_of_2(size), 32), 4096)
    return LaunchConfig(block, num_warps=min(max(block // 1024, 1), 4))


def rope_config(num_heads: int) -> LaunchConfig:
    """Give each program `block` heads of one token."""
    return LaunchConfig(min(next_power_of_2(num_heads), 8), num_warps=2)


def prefill_config(
    head_dim: int, group: int, block_size: int, element_size: int, architecture: int
) -> AttentionConfig:
    """Return tiles of the mixed kernel; `group` = query heads per KV head, `element_size` in bytes."""
    block_d = max(next_power_of_2(head_dim), MIN_DOT_SIZE)
    # Heads of 256 spill on sm_100.
    boxes = architecture == 90 or (block_d <= 128 and architecture in WARPGROUP_ARCHITECTURES)
    tma = boxes and element_size == 2 and block_size >= 64
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


def decode_config(head_dim: int, group: int, block_size: int, element_size: int) -> AttentionConfig:
    """Return tiles of the split-KV kernel, which is bandwidth-bound: small ones, with the next in flight."""
    block_d = max(next_power_of_2(head_dim), MIN_DOT_SIZE)
    block_m = max(next_power_of_2(group), MIN_DOT_SIZE)
    if element_size > 2:
        return AttentionConfig(block_m, min(32, block_size), block_d, num_warps=8, num_stages=2)
    return AttentionConfig(block_m, min(32 if block_d > 128 else 64, block_size), block_d, num_warps=4, num_stages=3)


def num_kv_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """Return the number of programs per sequence and KV head: enough to fill the device, none with too few keys.

    One is dropped if the last programs would otherwise wait and run alone. Depends on host values only, so a CUDA
    graph of a batch bucket can freeze it.
    """
    num_rows = max(num_seqs * num_kv_heads, 1)
    wanted = cdiv(PROGRAMS_PER_SM * num_sms, num_rows)
    if wanted * num_rows > RESIDENT_PROGRAMS_PER_SM * num_sms:
        wanted -= 1
    return max(1, min(wanted, cdiv(max_seq_len, MIN_KEYS_PER_SPLIT)))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return a GPU's streaming multiprocessors; a small number for interpretation or compilation elsewhere."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def architecture(device: torch.device) -> int:
    """Return a GPU's compute capability (90 for sm_90); elsewhere the compilation target."""
    return _capability(device) if device.type == "cuda" else compile_target.get()


@lru_cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
