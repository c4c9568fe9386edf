from __future__ import annotations

from itertools import product

import pytest
import torch

from tidewheel_kernels.launch_config import (
    architecture,
    compile_target,
    decode_config,
    next_power_of_2,
    num_kv_splits,
    prefill_config,
    row_config,
    vocabulary_config,
    vocabulary_programs,
)


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "max_seq_len", "splits"),
    [
        (1, 8, 128, 1),  # one split is enough keys
        (1, 8, 100_000, 33),  # 2 * 132 programs over 8
        (1, 1, 1024, 8),  # no split below 128 keys
        (33, 8, 100_000, 1),  # the batch alone fills the device
        (32, 8, 100_000, 1),  # a second split would not fit on the device at once
        (16, 8, 100_000, 3),
        (1, 8, 40_960, 33),  # a CUDA graph is frozen with max_model_len
        (1, 1, 0, 1),
    ],
)
def test_number_of_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, splits: int) -> None:
    assert num_kv_splits(num_seqs, num_kv_heads, max_seq_len, num_sms=132) == splits


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
