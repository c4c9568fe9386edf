from __future__ import annotations

from itertools import product

import pytest
import torch

from tidewheel_kernels.launch_config import (
    DecodeSplits,
    architecture,
    compile_target,
    decode_config,
    decode_splits,
    linear_config,
    next_power_of_2,
    prefill_config,
    row_config,
    vocabulary_config,
    vocabulary_programs,
)


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "max_seq_len", "limits"),
    [
        (1, 8, 128, (0, 128)),  # too few keys for two
        (1, 8, 40_960, (33, 128)),  # 2 * 132 programs over 8
        (1, 1, 1024, (7, 128)),  # eight splits at most
        (24, 8, 40_960, (25, 128)),  # 3 * 132 programs over 8 are resident
        (33, 8, 40_960, (16, 1024)),  # the batch alone fills the device
        (256, 8, 40_960, (33, 1024)),
        (256, 8, 1024, (0, 1024)),
        (1, 1, 0, (0, 128)),
    ],
)
def test_limits_of_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, limits: tuple[int, int]) -> None:
    assert decode_splits(num_seqs, num_kv_heads, max_seq_len, num_sms=132) == DecodeSplits(*limits)


def test_equal_lengths_are_split_until_the_batch_fills_the_device() -> None:
    """The plan splits what is longer than the keys of all, shared out among the extra programs."""
    expected = {1: 33, 2: 17, 4: 9, 8: 5, 16: 3, 17: 2, 24: 2, 25: 1, 32: 1, 64: 1, 256: 1, 512: 1}
    limits = {batch: decode_splits(batch, 8, 40_960, 132) for batch in expected}
    length = 40_960
    assert {b: -(-length // max(one.min_keys, -(-b * length // one.extra))) for b, one in limits.items()} == expected


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (80, 128), (128, 128)])
def test_next_power_of_2(n: int, power: int) -> None:
    assert next_power_of_2(n) == power


def test_attention_tiles_hold_the_group_and_divide_the_block() -> None:
    for shape in product((8, 80, 128, 256), (1, 3, 8, 71, 200), (16, 32, 64, 128), (2, 4)):
        head_dim, group, block_size, _ = shape
        for config in (decode_config(*shape), *(prefill_config(*shape, arch) for arch in (80, 90, 100))):
            assert config.block_m >= max(group, 16) and config.block_d >= max(head_dim, 16), shape
            assert config.block_n >= 16 and block_size % config.block_n == 0, shape


@pytest.mark.parametrize("size", [1, 63, 1024, 16_384, 151_936])
def test_rows_and_vocabularies(size: int) -> None:
    assert row_config(size).block >= size
    config = row_config(size)
    assert config.block == next_power_of_2(config.block) and 1 <= config.num_warps <= 16
    cut = vocabulary_config(size)
    assert cut.num_chunks * cut.chunk >= size and cut.num_tiles * cut.tile >= cut.num_chunks
    assert cut.block % cut.chunk == 0 and cut.capacity % cut.chunk == 0
    for power in (cut.chunk, cut.tile, cut.block, cut.capacity, cut.row_warps):
        assert power == next_power_of_2(power)


@pytest.mark.parametrize(
    ("num_rows", "programs"),
    [
        (1, 149),  # a tile each
        (32, 149),
        (128, 75),  # 132 of 149 wanted: two tiles each
        (256, 50),
        (100_000, 1),
        (0, 149),
    ],
)
def test_programs_that_share_a_row_of_logits(num_rows: int, programs: int) -> None:
    num_tiles = vocabulary_config(151_936).num_tiles
    assert vocabulary_programs(num_rows, num_tiles, num_sms=132) == programs
    assert programs * -(-num_tiles // programs) >= num_tiles


def test_architecture_off_the_gpu_is_the_compile_target() -> None:
    token = compile_target.set(80)
    assert architecture(torch.device("cpu")) == 80
    compile_target.reset(token)
    assert architecture(torch.device("cpu")) == 90


def test_rows_of_8_bits_that_are_no_multiple_of_16_bytes_go_through_pointers() -> None:
    for head_dim, expected in {64: True, 72: False, 80: True, 128: True}.items():
        assert prefill_config(head_dim, 2, 64, 2, 90, fp8=True).tma is expected
        assert prefill_config(head_dim, 2, 64, 2, 90).tma
    assert decode_config(128, 4, 64, 2, fp8=True).max_registers == 168
    assert decode_config(120, 4, 64, 2, fp8=True).max_registers is decode_config(128, 4, 64, 2).max_registers is None


@pytest.mark.parametrize(
    ("out_features", "in_features", "num_splits"),
    [
        (4096, 1024, 2),  # Qwen3-0.6B, two splits at most
        (1024, 3072, 6),
        (6144, 4096, 3),  # Llama-3.1-8B
        (4096, 14_336, 4),
        (28_672, 4096, 1),
        (151_936, 1024, 1),
        (64, 64, 1),
        (64, 1030, 2),
    ],
)
def test_splits_of_a_matrix(out_features: int, in_features: int, num_splits: int) -> None:
    for element_size in (2, 4):
        config = linear_config(out_features, in_features, element_size)
        assert config.split_len % config.block_k == 0
        assert (config.num_splits - 1) * config.split_len < in_features <= config.num_splits * config.split_len
    assert linear_config(out_features, in_features, 2).num_splits == num_splits
