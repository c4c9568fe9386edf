"""Random weights of 4 and 8 bits."""

from __future__ import annotations

import pytest
import torch

from tidewheel_kernels.grouped_linear.reference import Bits, GroupedWeights

BITS = pytest.mark.parametrize("bits", [4, 8])
SIZES = pytest.mark.parametrize("group_size", [32, 64, 128])
MINIMUMS = pytest.mark.parametrize("has_minimums", [False, True])


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn_weights(
    outputs: int, inputs: int, bits: Bits, group_size: int = 32, *, has_minimums: bool = True, seed: int = 1
) -> GroupedWeights:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs * bits // 8), dtype=torch.uint8, generator=generator)
    scales, minimums = torch.randn(2, outputs, inputs // group_size, generator=generator).half()
    return GroupedWeights(codes, scales, minimums if has_minimums else None, bits)
