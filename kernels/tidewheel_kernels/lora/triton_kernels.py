"""Products with adapters of low rank, a tile of tokens of one adapter at a time.

Inputs are cut into splits, by their number alone, so that few tiles fill more of a device; the second kernel adds the
splits' sums in order. Ranks past an adapter's own are neither read nor computed.
"""

from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import LowRankConfig, cdiv, lora_config
from tidewheel_kernels.lora.groups import TILE, LoraGroups
from tidewheel_kernels.lora.stacks import MAX_PARTS, LoraSizes, LoraStack, StaticLoraStack
from tidewheel_kernels.triton_launch import MAX_LAUNCHES, KernelLauncher

EXPAND_STAGES = 2  # most adapters have no second block of ranks


@triton.jit
def shrink_lora_kernel(
    x_ptr,  # [num_tokens, in_features]
    a_ptr,  # [max_loras, num_parts, max_rank, in_features]
    ranks_ptr,  # [max_loras, num_parts]
    tokens_ptr,  # [num_tiles, TILE]
    slots_ptr,  # [num_tiles]
    products_ptr,  # [splits, num_tiles, TILE, num_parts, RANKS] float32
    x_stride,
    in_features,
    max_rank,
    num_parts,
    split_len,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,  # multiple of BLOCK_R
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: [num_tiles, num_parts * RANKS / BLOCK_R, splits]
    tile, part = tl.program_id(0), tl.program_id(1) // (RANKS // BLOCK_R)
    first_rank = tl.program_id(1) % (RANKS // BLOCK_R) * BLOCK_R
    slot = tl.load(slots_ptr + tile)
    if slot < 0:
        return
    matrix = slot.to(tl.int64) * num_parts + part
    rank = tl.load(ranks_ptr + matrix)
    if first_rank >= rank:
        return
    token = tl.load(tokens_ptr + tile * TILE + tl.arange(0, TILE))
    row = first_rank + tl.arange(0, BLOCK_R)
    x_row_ptr = x_ptr + token.to(tl.int64) * x_stride
    a_row_ptr = a_ptr + (matrix * max_rank + row) * in_features
    total = tl.zeros([TILE, BLOCK_R], dtype=tl.float32)
    first = tl.program_id(2) * split_len
    for begin in range(first, tl.minimum(first + split_len, in_features), BLOCK_K):
        feature = begin + tl.arange(0, BLOCK_K)[None, :]
        is_input = feature < in_features
        x = tl.load(x_row_ptr[:, None] + feature, mask=(token >= 0)[:, None] & is_input, other=0.0)
        a = tl.load(a_row_ptr[:, None] + feature, mask=(row < rank)[:, None] & is_input, other=0.0)
        total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
    line = (tl.program_id(2) * tl.num_programs(0) + tile).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(products_ptr + ((line * num_parts + part) * RANKS)[:, None] + row[None, :], total)


@triton.jit
def _add_product(h, b, total):
    """Add ``h @ b``, of float32 and of the model's dtype."""
    if b.dtype == tl.bfloat16:  # two tensor-core products keep 16 bits of h
        high = h.to(tl.bfloat16)
        total = tl.dot((h - high.to(tl.float32)).to(tl.bfloat16), b, total)
        return tl.dot(high, b, total)
    return tl.dot(h, b.to(tl.float32), total, input_precision="ieee")


@triton.jit
def expand_lora_kernel(
    out_ptr,  # [num_tokens, out_features]
    b_ptr,  # [max_loras, max_rank, out_features]
    ranks_ptr,  # [max_loras, num_parts]
    tokens_ptr,  # [num_tiles, TILE]
    slots_ptr,  # [num_tiles]
    products_ptr,  # [NUM_SPLITS, num_tiles, TILE, num_parts, RANKS] float32
    out_stride,
    out_features,
    max_rank,
    num_parts,
    END_0: tl.constexpr,  # of the parts' outputs; a part that the layer lacks is empty
    END_1: tl.constexpr,
    END_2: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # grid: [num_tiles, blocks of all parts]
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + tile)
    if slot < 0:
        return
    FIRST_1: tl.constexpr = (END_0 + BLOCK_N - 1) // BLOCK_N
    FIRST_2: tl.constexpr = FIRST_1 + (END_1 - END_0 + BLOCK_N - 1) // BLOCK_N
    part = (block >= FIRST_1).to(tl.int32) + (block >= FIRST_2).to(tl.int32)
    end = tl.where(part == 0, END_0, tl.where(part == 1, END_1, END_2))
    begin = tl.where(
        part == 0, block * BLOCK_N,
        tl.where(part == 1, END_0 + (block - FIRST_1) * BLOCK_N, END_1 + (block - FIRST_2) * BLOCK_N),
    )  # fmt: skip
    rank = tl.load(ranks_ptr + slot.to(tl.int64) * num_parts + part)
    if rank == 0:
        return
    token = tl.load(tokens_ptr + tile * TILE + tl.arange(0, TILE))
    column = begin + tl.arange(0, BLOCK_N)
    line = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    split_size = tl.num_programs(0).to(tl.int64) * TILE * num_parts * RANKS
    total = tl.zeros([TILE, BLOCK_N], dtype=tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        row = first_rank + tl.arange(0, BLOCK_R)
        place = ((line * num_parts + part) * RANKS)[:, None] + row[None, :]
        h = tl.load(products_ptr + place)
        for split in tl.static_range(1, NUM_SPLITS):
            h += tl.load(products_ptr + split * split_size + place)
        b_row_ptr = b_ptr + (slot.to(tl.int64) * max_rank + row) * out_features
        b = tl.load(
            b_row_ptr[:, None] + column[None, :], mask=(row < rank)[:, None] & (column < end)[None, :], other=0.0
        )
        total = _add_product(h, b, total)
    out_row_ptr = out_ptr + token.to(tl.int64) * out_stride
    mask = (token >= 0)[:, None] & (column < end)[None, :]
    base = tl.load(out_row_ptr[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out_row_ptr[:, None] + column[None, :], (base + total).to(out_ptr.dtype.element_ty), mask=mask)


@lru_cache(MAX_LAUNCHES)
def _shrink(config: LowRankConfig, x_stride: int, sizes: LoraSizes) -> KernelLauncher:
    constants = {
        "x_stride": x_stride,
        "in_features": sizes.in_features,
        "max_rank": sizes.max_rank,
        "num_parts": len(sizes.part_sizes),
        "split_len": config.split_len,
        "TILE": TILE,
        "RANKS": config.ranks,
        "BLOCK_R": config.block_r,
        "BLOCK_K": config.block_k,
    }
    return KernelLauncher(shrink_lora_kernel, constants, num_warps=config.num_warps, num_stages=config.num_stages)


@lru_cache(MAX_LAUNCHES)
def _expand(config: LowRankConfig, out_stride: int, sizes: LoraSizes) -> KernelLauncher:
    ends = list(accumulate(sizes.part_sizes))
    ends += ends[-1:] * (MAX_PARTS - len(ends))
    constants = {
        "out_stride": out_stride,
        "out_features": sizes.out_features,
        "max_rank": sizes.max_rank,
        "num_parts": len(sizes.part_sizes),
        **{f"END_{part}": end for part, end in enumerate(ends)},
        "NUM_SPLITS": config.num_splits,
        "TILE": TILE,
        "RANKS": config.ranks,
        "BLOCK_R": config.block_r,
        "BLOCK_N": config.block_n,
    }
    return KernelLauncher(expand_lora_kernel, constants, num_warps=config.num_warps, num_stages=EXPAND_STAGES)


def add_lora(out: torch.Tensor, x: torch.Tensor, stack: LoraStack, groups: LoraGroups) -> None:
    if not isinstance(stack, StaticLoraStack):
        raise TypeError("the triton-lang kernels read a StaticLoraStack: make it while they are chosen")
    num_tiles, sizes = groups.num_tiles, stack.sizes
    if num_tiles == 0:
        return
    config, num_parts = lora_config(sizes.in_features, sizes.max_rank, x.element_size()), len(sizes.part_sizes)
    shape = config.num_splits, num_tiles, TILE, num_parts, config.ranks
    products = torch.empty(shape, dtype=torch.float32, device=x.device)
    others = stack.ranks, groups.tokens, groups.slots, products
    shrink, expand = _shrink(config, x.stride(0), sizes), _expand(config, out.stride(0), sizes)
    shrink((num_tiles, num_parts * config.ranks // config.block_r, config.num_splits), (x, stack.a, *others))
    expand((num_tiles, sum(cdiv(size, config.block_n) for size in sizes.part_sizes), 1), (out, stack.b, *others))
