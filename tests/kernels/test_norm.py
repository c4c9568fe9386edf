from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.kernels.kernel_harness import RATIO, assert_close, needs_compiler
from tidewheel_kernels import rms_norm
from tidewheel_kernels.norm import rms_norm_native
from tidewheel_kernels.norm.cpu import rms_norm_cpu
from tidewheel_kernels.norm.reference import NormResult, rms_norm_reference
from tidewheel_kernels.norm.triton_kernels import rms_norm as rms_norm_triton

Function = Callable[..., NormResult]
FUNCTIONS = {"triton": rms_norm_triton, "cpu": rms_norm_cpu, "native": rms_norm_native}
IMPLEMENTATIONS = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        pytest.param(function, dtype, id=f"{name}-{dtype}", marks=needs_compiler if name == "native" else ())
        for name, function in FUNCTIONS.items()
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        if not (name == "native" and dtype == torch.float16)
    ],
)


@IMPLEMENTATIONS
@pytest.mark.parametrize("offset", [0.0, 1.0], ids=lambda v: f"offset={v}")
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (63, 100), (3, 1024), (0, 64)], ids=lambda v: str(v))
def test_equals_reference(
    device: str, implementation: Function, tokens: int, hidden: int, offset: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, 2 * hidden, device=device).to(dtype)[:, :hidden]
    weight = torch.rand(hidden, device=device).to(dtype)
    assert_close(
        "normed",
        rms_norm_reference(x, weight, 1e-5, None, offset),
        implementation(x, weight, 1e-5, None, offset),
        RATIO[dtype],
    )


@IMPLEMENTATIONS
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (63, 100), (0, 64)], ids=lambda v: str(v))
def test_fused_residual_equals_reference(
    device: str, implementation: Function, tokens: int, hidden: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(tokens, hidden, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(hidden, device=device).to(dtype)
    given = x.clone(), residual.clone()
    normed, total = implementation(x, weight, 1e-5, residual, 0.0)
    ref_normed, ref_total = rms_norm_reference(x, weight, 1e-5, residual, 0.0)
    assert_close("normed", ref_normed, normed, RATIO[dtype])
    # The interpreter truncates to bfloat16 where GPUs round.
    assert_close("sum", ref_total, total, RATIO[dtype] if dtype == torch.bfloat16 else 1e-12)
    assert torch.equal(x, given[0]) and torch.equal(residual, given[1])


def test_reference_against_the_formula() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    normed = rms_norm(x, weight, 0.0)
    assert torch.allclose(normed, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


def test_the_row_is_normalised_after_rounding_the_sum() -> None:
    x, residual = torch.tensor([[256.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 0.0]]).bfloat16()
    normed, total = rms_norm(x, torch.ones(2).bfloat16(), 0.0, residual)
    assert total.tolist() == [[256.0, 1.0]]
    assert torch.equal(normed, rms_norm(total, torch.ones(2).bfloat16(), 0.0))
