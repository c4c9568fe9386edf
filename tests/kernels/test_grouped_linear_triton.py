"""Weights of 4 and 8 bits on a GPU: products with floats that are not rounded."""

from __future__ import annotations

import pytest
import torch

from support.kernels.grouped_weights import BITS, MINIMUMS, SIZES, drawn, drawn_weights
from support.kernels.kernel_harness import RATIO, assert_close
from tidewheel_kernels.grouped_linear import grouped_embedding
from tidewheel_kernels.grouped_linear.reference import Bits, GroupedWeights, dequantize, grouped_linear_reference
from tidewheel_kernels.grouped_linear.triton_kernels import grouped_linear as grouped_linear_triton
from tidewheel_kernels.launch_config import grouped_config


def on(weights: GroupedWeights, device: str) -> GroupedWeights:
    codes, scales, minimums, bits = weights
    return GroupedWeights(
        codes.to(device), scales.to(device), None if minimums is None else minimums.to(device), bits
    )


@pytest.fixture
def dtype(device: str, request: pytest.FixtureRequest) -> torch.dtype:
    if device == "cpu" and request.param == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    assert isinstance(request.param, torch.dtype)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str, indirect=True)
@BITS
@SIZES
@MINIMUMS
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 17])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 128), (40, 640)], ids=["whole", "split"])
def test_as_the_reference(
    device: str, dtype: torch.dtype, bits: Bits, group_size: int, has_minimums: bool, has_bias: bool, num_rows: int,
    outputs: int, inputs: int,
) -> None:  # fmt: skip
    weights = on(drawn_weights(outputs, inputs, bits, group_size, has_minimums=has_minimums), device)
    x = drawn(num_rows, inputs + 8).to(device, dtype)[:, :inputs]
    arguments = x, weights, drawn(outputs, seed=3).to(device, dtype) if has_bias else None
    if num_rows:
        assert (grouped_config(num_rows, outputs, inputs, dtype.itemsize).num_splits > 1) == (inputs > 128)
    expected, found = grouped_linear_reference(*arguments), grouped_linear_triton(*arguments)
    assert_close("product", expected, found, RATIO[dtype])


def test_other_weights_of_the_same_shape(device: str) -> None:
    """Layers are swapped for their copies between two steps."""
    x = drawn(2, 128).to(device)
    for seed in (1, 2):
        weights = on(drawn_weights(64, 128, 4, seed=seed), device)
        found = grouped_linear_triton(x, weights, None)
        assert_close("product", grouped_linear_reference(x, weights, None), found, RATIO[torch.float32])


def test_a_row_that_is_no_number_changes_no_other(device: str) -> None:
    x, weights = drawn(3, 128).to(device), on(drawn_weights(64, 128, 8), device)
    expected = grouped_linear_triton(x, weights, None)
    x[1, 4] = float("nan")
    found = grouped_linear_triton(x, weights, None)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])


@BITS
def test_embeddings(device: str, bits: Bits) -> None:
    weights, ids = on(drawn_weights(30, 128, bits), device), torch.tensor([29, 0, 29], device=device)
    found = grouped_embedding(ids, weights, torch.float16)
    assert torch.equal(found, dequantize(weights)[ids].half())
