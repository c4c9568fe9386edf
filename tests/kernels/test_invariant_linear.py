"""A row of the product is bitwise the same alone, in any batch and at any place."""

from __future__ import annotations

import random

import pytest
import torch

from support.kernels.kernel_harness import RATIO, assert_close
from tidewheel_kernels import invariant_linear
from tidewheel_kernels.invariant_linear import triton_kernels
from tidewheel_kernels.invariant_linear.reference import invariant_linear_reference
from tidewheel_kernels.invariant_linear.triton_kernels import invariant_linear as invariant_linear_triton
from tidewheel_kernels.launch_config import linear_config

# The interpreter multiplies bfloat16 bit patterns in tl.dot.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
SPLIT = 70, 1030  # outputs and inputs of a matrix with two splits
MATRICES = pytest.mark.parametrize(("out_features", "in_features"), [(300, 96), SPLIT], ids=["whole", "split"])


@pytest.fixture
def where(device: str, request: pytest.FixtureRequest) -> str:
    if device == "cpu" and request.getfixturevalue("dtype") == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    return device


def drawn(num_rows: int, width: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@DTYPES
@MATRICES
@pytest.mark.parametrize("num_rows", [1, 33])
def test_as_the_reference(where: str, dtype: torch.dtype, num_rows: int, out_features: int, in_features: int) -> None:
    x, weight = drawn(num_rows, in_features, dtype, where), drawn(out_features, in_features, dtype, where, 1)
    for bias in (None, weight[:, 0].contiguous()):
        arguments = (x, weight, bias)
        assert_close(
            "product", invariant_linear_reference(*arguments), invariant_linear_triton(*arguments), RATIO[dtype]
        )


@DTYPES
@MATRICES
@pytest.mark.usefixtures("exact_rows")
def test_a_row_does_not_depend_on_its_batch(
    where: str, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    num_rows = linear_config(out_features, in_features, dtype.itemsize).block_m + 3
    x, weight = drawn(num_rows, in_features, dtype, where), drawn(out_features, in_features, dtype, where, 1)
    bias, draw = weight[:, 1].contiguous(), random.Random(out_features)
    expected = invariant_linear_triton(x, weight, bias)
    for count in (1, 1, 2, num_rows - 2):
        chosen = torch.tensor(draw.sample(range(num_rows), count), device=where)
        assert torch.equal(invariant_linear_triton(x[chosen], weight, bias), expected[chosen]), count


@pytest.mark.usefixtures("exact_rows")
@pytest.mark.parametrize("has_bias", [False, True])
def test_programs_for_splits_change_nothing(device: str, monkeypatch: pytest.MonkeyPatch, has_bias: bool) -> None:
    """Few rows have a program for each split, many one for all; other splits are other sums."""
    x, weight = drawn(40, SPLIT[1], torch.float32, device), drawn(*SPLIT, torch.float32, device, 1)
    arguments = (x, weight, weight[:, 1].contiguous() if has_bias else None)
    config = linear_config(*SPLIT, 4)
    assert config.num_splits == 2
    split = invariant_linear_triton(*arguments)
    monkeypatch.setattr(triton_kernels, "MOST_SPLIT_TILES", 0)
    assert torch.equal(invariant_linear_triton(*arguments), split)
    longer = config._replace(split_len=config.split_len + config.block_k)
    monkeypatch.setattr(triton_kernels, "linear_config", lambda *_: longer)
    assert not torch.equal(invariant_linear_triton(*arguments), split)


def test_rows_that_lie_apart_and_none(device: str) -> None:
    x, weight = drawn(5, 128, torch.float32, device)[:, :96], drawn(7, 96, torch.float32, device, 1)
    apart = invariant_linear_triton(x, weight, None)
    assert_close("product", invariant_linear_reference(x, weight, None), apart, RATIO[torch.float32])
    assert invariant_linear_triton(x[:0], weight, None).shape == (0, 7)


def test_a_row_that_is_no_number_changes_no_other(device: str) -> None:
    x, weight = drawn(3, 96, torch.float32, device), drawn(7, 96, torch.float32, device, 1)
    expected = invariant_linear_triton(x, weight, None)
    x[1, 4] = float("nan")
    found = invariant_linear_triton(x, weight, None)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])


def test_the_operation() -> None:
    x, weight = drawn(3, 8, torch.float32, "cpu"), drawn(5, 8, torch.float32, "cpu", 1)
    torch.testing.assert_close(invariant_linear(x, weight, weight[:, 0]), x @ weight.T + weight[:, 0])
    for wrong in (weight.half(), weight[:, :4], weight.T.contiguous().T):
        with pytest.raises(ValueError, match="do not fit"):
            invariant_linear(x, wrong)
