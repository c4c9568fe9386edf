"""Recorded launch configurations: block sizes, warps and pipeline stages. Nothing is tuned at run time.

The attention entries were chosen so that the compiler needs no stack on sm_80, sm_90 and sm_100 with bfloat16 and
head_dim <= 128; ``python -m tidewheel_kernels.aot --json`` recompiles all of them and lists registers and spills.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

# Keys that one program of the decode kernel should at least read, so that merging partial results stays cheap.
MIN_KEYS_PER_SPLIT = 128
# Programs of the decode kernel per multiprocessor: two, to hide one's latency behind the other.
PROGRAMS_PER_SM = 2
# tl.dot wants at least this many rows.
MIN_DOT_ROWS = 16


class LaunchConfig(NamedTuple):
    """`block` is the number of elements, or of rows, that one program handles."""

    block: int
    num_warps: int
    num_stages: int = 1


class AttentionConfig(NamedTuple):
    block_m: int  # rows: query tokens x query heads of one KV head
    block_n: int  # keys per tile; divides the KV block
    block_d: int  # head_dim rounded up to a power of two
    num_warps: int
    num_stages: int


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def row_config(size: int) -> LaunchConfig:
    """One program per row of `size` elements, held in registers: about eight 16-bit elements per thread and step."""
    block = max(next_power_of_2(size), 32)
    return LaunchConfig(block, num_warps=min(max(block // 512, 1), 16))


def elementwise_config(size: int) -> LaunchConfig:
    block = min(max(next_power_of_2(size), 32), 1024)
    return LaunchConfig(block, num_warps=min(max(block // 256, 1), 4))


def vocabulary_config(vocabulary: int) -> LaunchConfig:
    """One program streams a whole row of logits: many warps, for a batch often has fewer rows than the GPU SMs."""
    block = min(max(next_power_of_2(vocabulary), 64), 8192)
    return LaunchConfig(block, num_warps=min(max(block // 256, 1), 16))


def rope_config(num_heads: int) -> LaunchConfig:
    """`block` heads of one token per program."""
    return LaunchConfig(min(next_power_of_2(num_heads), 8), num_warps=2)


def prefill_config(head_dim: int, group: int, block_size: int, element_size: int) -> AttentionConfig:
    """Tiles of the mixed kernel; `group` = query heads per KV head, `element_size` in bytes."""
    block_d = max(next_power_of_2(head_dim), 16)
    wide = block_d > 128 or element_size > 2
    block_m = max(64 if wide else 128, next_power_of_2(group))
    block_n = min(block_size, 32 if wide else 64)
    num_warps = 4 if block_m * block_d <= 64 * 64 else 8
    return AttentionConfig(block_m, block_n, block_d, num_warps, num_stages=1 if element_size > 2 else 2)


def decode_config(head_dim: int, group: int, block_size: int, element_size: int) -> AttentionConfig:
    """Tiles of the split-KV kernel: bandwidth-bound, so small tiles, few warps and a deeper pipeline."""
    block_d = max(next_power_of_2(head_dim), 16)
    wide = block_d > 128 or element_size > 2
    block_m = max(MIN_DOT_ROWS, next_power_of_2(group))
    block_n = min(block_size, 32 if wide else 64)
    return AttentionConfig(block_m, block_n, block_d, num_warps=4, num_stages=2 if wide else 3)


def num_kv_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """Programs that share the keys of one sequence and KV head: enough to fill the device, none with too few keys.

    Depends on host values only, so that it can be frozen in a CUDA graph of a batch bucket.
    """
    wanted = cdiv(PROGRAMS_PER_SM * num_sms, max(num_seqs * num_kv_heads, 1))
    return max(1, min(wanted, cdiv(max_seq_len, MIN_KEYS_PER_SPLIT)))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a small number elsewhere, where kernels are interpreted or only compiled."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
