from __future__ import annotations

import pytest
import torch

from support.kernel_harness import assert_close
from tidewheel_kernels import compute_logprobs
from tidewheel_kernels.jit.logprobs import chosen_logprobs as chosen_triton
from tidewheel_kernels.logprobs import chosen_logprobs_reference

INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (3, 63), (2, 8200), (0, 10)], ids=str)
def test_kernel_equals_reference(device: str, rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(device, dtype)
    ids = torch.randint(0, vocabulary, (rows,), generator=generator).to(device)
    ours, reference = chosen_triton(logits, ids), chosen_logprobs_reference(logits, ids)
    assert_close("logprobs", reference.logprobs, ours.logprobs, 1e-5)
    assert_close("log_normalizer", reference.log_normalizer, ours.log_normalizer, 1e-5)
    assert torch.equal(ours.ranks, reference.ranks)


def test_ids_out_of_range_and_masked_tokens(device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, -INF, 2.0]]).repeat(5, 1).to(device)
    ids = torch.tensor([-1, 4, 2, 3, 0], dtype=torch.int32, device=device)
    for chosen in (chosen_triton(logits, ids), chosen_logprobs_reference(logits, ids)):
        assert chosen.ranks.tolist() == [0, 0, 4, 1, 3]
        assert chosen.logprobs[:2].isnan().all() and chosen.logprobs[2].item() == -INF
        assert chosen.log_normalizer.isfinite().all()


def test_public_function_against_log_softmax() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).half()
    ids = torch.tensor([0, 10, 49])
    output = compute_logprobs(logits, ids, 5)
    expected = logits.float().log_softmax(-1)
    assert torch.allclose(output.logprobs, expected[range(3), ids], atol=1e-6)
    assert torch.allclose(output.top_logprobs, expected.topk(5).values, atol=1e-6)
    assert torch.equal(expected.gather(-1, output.top_token_ids), expected.topk(5).values)


def test_number_of_top_tokens() -> None:
    logits = torch.zeros(1, 4)
    assert compute_logprobs(logits, torch.tensor([0]), 0).top_token_ids.shape == (1, 0)
    with pytest.raises(ValueError, match="num_top"):
        compute_logprobs(logits, torch.tensor([0]), 5)
