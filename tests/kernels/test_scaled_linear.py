from __future__ import annotations

from unittest import mock

import pytest
import torch

from tidewheel_kernels import FP8, quantize_rows, scaled_linear
from tidewheel_kernels.scaled_linear.reference import scaled_linear_reference
from tidewheel_kernels.scaled_linear.triton_kernels import quantize_rows as quantize_triton
from tidewheel_kernels.scaled_linear.triton_kernels import scaled_linear as linear_triton
from tidewheel_kernels.switches import tried

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
NARROW = pytest.mark.parametrize("narrow", [FP8, torch.int8])


def rows(num_rows: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    values = torch.randn(num_rows, width, generator=generator) * torch.logspace(-6, 4, num_rows).unsqueeze(1)
    return values.to(dtype).to(device)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare bits, which NaN has many of."""
    ours, theirs = ours.float(), theirs.float()
    return bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


@DTYPES
@NARROW
@pytest.mark.parametrize(("num_rows", "width"), [(1, 16), (5, 80), (3, 1024), (2, 3000)])
def test_rows_are_rounded_as_by_the_reference(
    device: str, dtype: torch.dtype, narrow: torch.dtype, num_rows: int, width: int
) -> None:
    x = rows(num_rows, width, dtype, device)
    ours = [part.cpu() for part in quantize_triton(x, narrow)]
    theirs = quantize_rows(x.cpu(), narrow)  # on a GPU, torch divides by multiplying with a reciprocal
    assert same(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_rows_that_lie_apart(device: str) -> None:
    x = rows(4, 96, torch.float32, device)[:, :64]
    assert same(quantize_triton(x)[0], quantize_rows(x.contiguous())[0])


def test_no_rows(device: str) -> None:
    narrow, scales = quantize_triton(torch.empty(0, 32, device=device))
    assert (narrow.shape, scales.shape) == ((0, 32), (0, 1))


@pytest.mark.parametrize("quantize", [quantize_triton, quantize_rows], ids=["triton", "reference"])
def test_odd_rows_keep_to_themselves(device: str, quantize: object) -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")], [448.0, -1e-30]], device=device)
    assert callable(quantize)
    narrow, scales = (part.float().cpu() for part in quantize(x))
    assert torch.equal(narrow[0], torch.zeros(2))
    assert narrow[1].isnan().any()
    assert narrow[2].isnan().any()
    assert narrow[3].tolist() == [448.0, 0.0]
    assert scales[3].item() == 1.0


def test_the_error_is_that_of_eight_bits() -> None:
    """Half a step of three bits for each factor, in the mean over many products."""
    x, weight = rows(6, 512, torch.float32, "cpu"), torch.randn(48, 512, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-1, 1, 48)
    exact = torch.nn.functional.linear(x, weight)
    found = scaled_linear(x, *quantize_rows(weight))
    error = (found - exact).square().mean(1).sqrt() / exact.square().mean(1).sqrt()
    assert 0.005 < error.min() <= error.max() < 0.06
    assert torch.equal(scaled_linear(x, *quantize_rows(weight), bias), found + bias)


@NARROW
def test_a_row_that_is_no_number_changes_no_other(narrow: torch.dtype) -> None:
    x, weight = rows(3, 32, torch.float32, "cpu"), quantize_rows(rows(16, 32, torch.float32, "cpu"), narrow)
    expected = scaled_linear(x, *weight)
    for value in ("nan", "inf"):
        x[1, 4] = float(value)
        found = scaled_linear(x, *weight)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_integers_round_half_to_even(device: str) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -126.4]], device=device)
    assert quantize_triton(x, torch.int8)[0].tolist() == [[127, 0, 2, -2, -126]]


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 17, 33])
def test_products_of_integers(
    device: str, dtype: torch.dtype, num_rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":  # without VNNI, oneDNN saturates sums of two products
        monkeypatch.setattr(torch, "_int_mm", lambda x, weight: x.int() @ weight.int())
    x, weight = rows(num_rows, 72, dtype, device)[:, :64], rows(40, 64, torch.float32, device)
    bias = torch.linspace(-1, 1, 40, device=device, dtype=dtype) if has_bias else None
    if num_rows > 1:
        x[1, 4] = float("inf")
    codes, scales = quantize_rows(weight, torch.int8)
    scales = (scales * 2**20).half()
    x_cpu, codes_cpu, scales_cpu = x.cpu(), codes.cpu(), scales.cpu()  # torch divides exactly there
    expected = scaled_linear_reference(x_cpu, codes_cpu, scales_cpu, None if bias is None else bias.cpu())
    found = linear_triton(x, codes, scales, bias).cpu()
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_integers_err_by_half_a_step_of_each_input() -> None:
    x, weight = rows(20, 256, torch.float32, "cpu"), quantize_rows(rows(24, 256, torch.float32, "cpu"), torch.int8)
    values = weight[0].double() * weight[1]
    limit = x.double().abs().amax(1, keepdim=True) / 254 * values.abs().sum(1)
    error = (scaled_linear(x, *weight) - x.double() @ values.T).abs()
    assert ((error.amax(1) > 0) & (error <= limit * (1 + 1e-4)).all(1)).all()


@pytest.mark.parametrize("wanted", [False, True])
def test_sums_stay_in_the_tensor_cores_where_that_is_tried(
    device: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = mock.Mock()
    monkeypatch.setattr(torch, "_scaled_mm", product)
    token = tried.set(frozenset(["fast_accumulation"] if wanted else []))
    linear_triton(rows(2, 32, torch.bfloat16, device), torch.ones(16, 32), torch.ones(16, 1), None)
    tried.reset(token)
    assert product.call_args.kwargs["use_fast_accum"] is wanted


def test_what_does_not_fit_is_refused() -> None:
    weight, scales = quantize_rows(torch.ones(16, 32))
    with pytest.raises(ValueError, match=r"x \(1, 16\), weight \(16, 32\) .* do not fit"):
        scaled_linear(torch.ones(1, 16), weight, scales)
    with pytest.raises(ValueError, match="float32"):
        scaled_linear(torch.ones(1, 32), weight.float(), scales)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@NARROW
@pytest.mark.parametrize("num_rows", [1, 3, 16, 130])
def test_products_of_a_gpu(narrow: torch.dtype, num_rows: int) -> None:
    x, weight = rows(num_rows, 512, torch.bfloat16, "cpu"), quantize_rows(rows(96, 512, torch.float32, "cpu"), narrow)
    bias = torch.linspace(-1, 1, 96).to(torch.bfloat16)
    expected = scaled_linear(x, *weight, bias)
    found = scaled_linear(x.cuda(), *(part.cuda() for part in weight), bias.cuda()).cpu()
    # Both are rounded to bfloat16; before, the tensor cores err by a share of the factors, not of their sum.
    lengths = x.float().norm(dim=1, keepdim=True) * (weight[0].float() * weight[1]).norm(dim=1)
    limit = 2.0**-7 * expected.float().abs() + 1e-3 * lengths
    assert ((found.float() - expected.float()).abs() <= limit).all()
