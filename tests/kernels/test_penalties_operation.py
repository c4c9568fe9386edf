from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.kernel_harness import RATIO, assert_close
from tidewheel_kernels import PenaltyTensors, apply_logit_bias, apply_penalties
from tidewheel_kernels.jit.penalties import apply_logit_bias as bias_triton
from tidewheel_kernels.jit.penalties import apply_penalties as penalties_triton
from tidewheel_kernels.penalties import apply_logit_bias_reference, apply_penalties_reference

INF = float("inf")


def penalties(device: str, num_rows: int, vocabulary: int, num_entries: int) -> PenaltyTensors:
    """Distinct random entries, between entries that must be skipped."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randperm(num_rows * vocabulary, generator=generator)[:num_entries]
    bad_rows, bad_tokens = torch.tensor([-1, num_rows, 0, 0]), torch.tensor([0, 0, -1, vocabulary])
    rows, tokens = torch.cat((flat // vocabulary, bad_rows)), torch.cat((flat % vocabulary, bad_tokens))
    return PenaltyTensors(
        rows=rows.int().to(device),
        token_ids=tokens.int().to(device),
        output_counts=torch.randint(0, 4, rows.shape, generator=generator).int().to(device),
        in_prompt=(torch.rand(rows.shape, generator=generator) < 0.5).to(device),
        repetition=(torch.rand(num_rows, generator=generator) + 0.5).to(device),
        presence=torch.randn(num_rows, generator=generator).to(device),
        frequency=torch.randn(num_rows, generator=generator).to(device),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_entries", [1, 63, 600])
def test_penalty_kernel_equals_reference(device: str, num_entries: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = torch.randn(3, 1000, device=device).to(dtype)
    before, reference = ours.clone(), ours.clone()
    columns = penalties(device, 3, 1000, num_entries)
    penalties_triton(ours, columns)
    apply_penalties_reference(reference, columns)
    assert_close("logits", reference, ours, RATIO[dtype])
    assert torch.equal(ours == before, reference == before)


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
    columns = PenaltyTensors(
        rows=torch.tensor([0, 0, 0, 1], dtype=torch.int32),
        token_ids=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        output_counts=torch.tensor([0, 3, 2, 1], dtype=torch.int32),
        in_prompt=torch.tensor([True, False, True, False]),
        repetition=torch.tensor([2.0, 1.0]),
        presence=torch.tensor([0.5, 0.0]),
        frequency=torch.tensor([0.25, 0.0]),
    )
    apply_penalties(logits, columns)
    assert logits.tolist() == [[1.0, -4.0 - 0.75 - 0.5, 1.0 - 0.5 - 0.5, 5.0], [1.0, 1.0, 1.0, 1.0]]


@pytest.fixture(params=["triton", "reference"])
def bias(request: pytest.FixtureRequest) -> Callable[..., None]:
    return {"triton": bias_triton, "reference": apply_logit_bias_reference}[request.param]


def test_bias_adds_up_and_forbids(bias: Callable[..., None], device: str) -> None:
    logits = torch.zeros(2, 300, device=device)
    rows = torch.tensor([0, 0, 1, 1, 1, -1, 2, 0, 1], dtype=torch.int32, device=device)
    tokens = torch.tensor([7, 7, 299, 5, 5, 0, 0, -1, 300], dtype=torch.int32, device=device)
    values = torch.tensor([1.5, 2.0, -3.0, -INF, 10.0, 9.0, 9.0, 9.0, 9.0], device=device)
    bias(logits, rows, tokens, values)
    expected = torch.zeros(2, 300)
    expected[0, 7], expected[1, 299], expected[1, 5] = 3.5, -3.0, -INF
    assert torch.equal(logits.cpu(), expected)


def test_many_bias_entries(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 100, generator=generator).to(device)
    reference = logits.clone()
    rows = torch.randint(0, 4, (1000,), generator=generator).int().to(device)
    tokens = torch.randint(0, 100, (1000,), generator=generator).int().to(device)
    values = torch.randn(1000, generator=generator).to(device)
    bias_triton(logits, rows, tokens, values)
    apply_logit_bias_reference(reference, rows, tokens, values)
    assert_close("logits", reference, logits, 1e-6)


def test_nothing_to_do_and_wrong_dtype() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    logits = torch.ones(1, 4)
    apply_logit_bias(logits, none, none, torch.zeros(0))
    apply_penalties(logits, penalties("cpu", 1, 4, 0))
    assert logits.tolist() == [[1.0] * 4]
    with pytest.raises(TypeError, match="float32"):
        apply_logit_bias(logits.half(), none, none, torch.zeros(0))
