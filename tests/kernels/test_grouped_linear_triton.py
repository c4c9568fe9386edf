"""Weights of 4 and 8 bits on a GPU: products with floats that are not rounded."""

from __future__ import annotations

import pytest
import torch

from support.kernels.grouped_weights import BITS, MINIMUMS, SIZES, drawn, drawn_weights
from support.kernels.kernel_harness import RATIO, assert_close
from tidewheel_kernels.grouped_linear import grouped_embedding, grouped_linear
from tidewheel_kernels.grouped_linear.reference import (
    Bits,
    GroupedWeights,
    dequantize,
    grouped_linear_reference,
    signed_by_output,
)
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


def one_scale(outputs: int, inputs: int) -> GroupedWeights:
    """Return symmetric weights of 8 bits whose outputs have one scale each, held by groups of 32."""
    codes, scales, *_ = drawn_weights(outputs, inputs, 8)
    return GroupedWeights(codes, scales[:, :1].repeat(1, inputs // 32), None, 8)


@pytest.mark.parametrize("inputs", [96, 640])
def test_many_rows_are_rounded_for_signed_weights(device: str, inputs: int) -> None:
    weights, x = on(one_scale(72, inputs), device), drawn(17, inputs).to(device)
    signed = signed_by_output(weights)
    assert (signed.is_signed, signed.nbytes) == (True, 72 * inputs + 2 * 72)
    assert torch.equal(dequantize(signed), dequantize(weights))
    expected = grouped_linear_reference(x, weights, None)
    assert_close("product", expected, grouped_linear_triton(x, signed, None), RATIO[torch.float32])
    assert_close("few rows", expected[:16], grouped_linear(x[:16], signed), RATIO[torch.float32])
    error = (grouped_linear(x, signed) - expected).square().mean() / expected.square().mean()
    assert 0.001 < error.sqrt() < 0.02


@pytest.mark.parametrize(
    "weights",
    [
        drawn_weights(24, 64, 4),
        drawn_weights(24, 64, 8),
        drawn_weights(24, 64, 8, has_minimums=False),
        one_scale(20, 64),
    ],
    ids=["4 bits", "minimums", "groups", "outputs"],
)
def test_other_weights_stay_unsigned(weights: GroupedWeights) -> None:
    assert signed_by_output(weights) is weights


@BITS
def test_embeddings(device: str, bits: Bits) -> None:
    weights, ids = on(drawn_weights(30, 128, bits), device), torch.tensor([29, 0, 29], device=device)
    found = grouped_embedding(ids, weights, torch.float16)
    assert torch.equal(found, dequantize(weights)[ids].half())
