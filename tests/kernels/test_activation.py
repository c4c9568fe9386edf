from __future__ import annotations

import pytest
import torch

from support.kernels.kernel_harness import RATIO, assert_close, needs_compiler
from tidewheel_kernels import silu_and_mul
from tidewheel_kernels.activation import silu_and_mul_native
from tidewheel_kernels.activation.cpu import silu_and_mul_cpu
from tidewheel_kernels.activation.reference import silu_and_mul_reference
from tidewheel_kernels.activation.triton_kernels import silu_and_mul as silu_and_mul_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (63, 100), (2, 2049), (0, 16)], ids=str)
def test_equals_reference(device: str, tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(tokens, 2 * size, device=device).mul(4).to(dtype)
    reference = silu_and_mul_reference(gate_up)
    assert_close("kernel", reference, silu_and_mul_triton(gate_up), RATIO[dtype])
    assert_close("cpu", reference, silu_and_mul_cpu(gate_up), RATIO[dtype])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (63, 100), (2, 2049), (0, 16)], ids=str)
def test_the_native_kernel_equals_the_reference(tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(tokens, 2 * size).mul(4).to(dtype)
    assert_close("native", silu_and_mul_reference(gate_up), silu_and_mul_native(gate_up), RATIO[dtype])


@needs_compiler
def test_large_gates_do_not_overflow_in_the_native_kernel() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 1.0, 2.0]])
    assert silu_and_mul_native(gate_up).tolist() == [pytest.approx([0.0, 2e4], abs=1e-30)]


def test_large_gates_do_not_overflow(device: str) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 1.0, 2.0]], device=device)
    assert silu_and_mul_triton(gate_up).tolist() == [[0.0, 2e4]]


def test_gate_is_the_first_half() -> None:
    assert silu_and_mul(torch.tensor([[0.0, 5.0]])).item() == 0.0
    assert silu_and_mul(torch.tensor([[5.0, 0.0]])).item() == 0.0


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="even last dimension"):
        silu_and_mul(torch.zeros(1, 3))
