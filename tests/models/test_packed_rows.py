"""Packed layers run on few row counts, so that what oneDNN keeps per row count stays small."""

from __future__ import annotations

import pytest
import torch

from tidewheel.models.linear import Linear
from tidewheel_kernels.packed_linear import can_pack, padded_rows


def test_few_row_counts_and_little_waste() -> None:
    padded = [padded_rows(count) for count in range(1, 4097)]
    assert all(count <= more <= count * 1.25 for count, more in enumerate(padded, start=1))
    assert all(more <= count + 1 for count, more in enumerate(padded[:64], start=1))
    assert len(set(padded)) <= 72


@pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no packed linear layer")
@pytest.mark.parametrize("rows", [0, 1, 7, 9, 33, 65])
def test_padding_does_not_show(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    layer = Linear(torch.randn(24, 48, generator=generator), torch.randn(24, generator=generator), None, {})
    x = torch.randn(rows, 48, generator=generator)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    layer.pack()
    torch.testing.assert_close(layer(x), expected)
