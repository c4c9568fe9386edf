from __future__ import annotations

from unittest import mock

import pytest
import torch

from support.kernels.interpreted_runs import slow_interpreted
from support.kernels.kernel_harness import assert_close
from tidewheel_kernels import compute_logprobs
from tidewheel_kernels.launch_config import vocabulary_config
from tidewheel_kernels.logprobs import triton_kernels as kernels
from tidewheel_kernels.logprobs.reference import LogprobsOutput, compute_logprobs_reference

INF, NAN = float("inf"), float("nan")
CHUNK = vocabulary_config(1).chunk


def assert_same(logits: torch.Tensor, ours: LogprobsOutput, reference: LogprobsOutput) -> None:
    """Equal but for rounding; of tokens that tie, the kernel takes the lowest ids."""
    assert_close("logprobs", reference.logprobs, ours.logprobs, 1e-5)
    assert torch.equal(ours.ranks, reference.ranks)
    assert_close("top_logprobs", reference.top_logprobs, ours.top_logprobs, 1e-5)
    by_value_then_id = logits.float().sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(ours.top_token_ids, by_value_then_id[:, : ours.top_token_ids.shape[1]])


def compare(device: str, rows: int, vocabulary: int, num_top: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(device, dtype)
    ids = torch.randint(0, vocabulary, (rows,), generator=generator).to(device)
    ours = kernels.compute_logprobs(logits, ids, num_top)
    assert_same(logits, ours, compute_logprobs_reference(logits, ids, num_top))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocabulary", "num_top"),
    [(1, 1, 1), (3, 63, 20), (2, 8200, 20), (2, CHUNK, 0), (0, 10, 3)],
    ids=str,
)
def test_kernel_equals_reference(device: str, rows: int, vocabulary: int, num_top: int, dtype: torch.dtype) -> None:
    compare(device, rows, vocabulary, num_top, dtype)


@pytest.mark.parametrize("dtype", [*slow_interpreted([torch.float32, torch.float16]), torch.bfloat16], ids=str)
def test_many_log_probabilities(device: str, dtype: torch.dtype) -> None:
    compare(device, 2, 8200, 256, dtype)


def test_the_most_likely_tokens_may_all_tie_or_all_stand_in_one_chunk(device: str) -> None:
    logits = torch.zeros(3, 3 * CHUNK)
    logits[1, CHUNK + 7 : CHUNK + 37] = torch.arange(30.0)
    logits[2, ::100] = 1.0
    ids = torch.zeros(3, dtype=torch.int64)
    ours = kernels.compute_logprobs(logits.to(device), ids.to(device), 20)
    assert_same(logits, LogprobsOutput(*(x.cpu() for x in ours)), compute_logprobs_reference(logits, ids, 20))


def test_fewer_tokens_than_are_asked_for(device: str) -> None:
    """What is forbidden comes last, at -inf, each token once."""
    logits = torch.full((1, CHUNK + 3), -INF)
    logits[0, [5, CHUNK]] = torch.tensor([1.0, 2.0])
    ours = kernels.compute_logprobs(logits.to(device), torch.tensor([5], device=device), 6)
    assert ours.top_token_ids.tolist() == [[CHUNK, 5, 0, 1, 2, 3]]
    assert ours.top_logprobs[0, :2].isfinite().all() and (ours.top_logprobs[0, 2:] == -INF).all()
    tiny = kernels.compute_logprobs(torch.zeros(1, 4, device=device), torch.tensor([3], device=device), 4)
    assert tiny.top_token_ids.tolist() == [[0, 1, 2, 3]]


def test_the_result_does_not_depend_on_how_many_programs_share_a_row(device: str) -> None:
    logits = torch.randn(2, 4000, generator=torch.Generator().manual_seed(3)).to(device)
    ids = torch.tensor([17, 3999], device=device)
    outputs = []
    for number in (1, 2, 4):
        with mock.patch.object(kernels, "vocabulary_programs", lambda rows, tiles, sms, n=number: n):
            outputs.append(kernels.compute_logprobs(logits, ids, 5))
    for output in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(output, outputs[0], strict=True))


def test_unusable_rows_leave_the_others_alone(device: str) -> None:
    logits = torch.randn(4, 2 * CHUNK, generator=torch.Generator().manual_seed(4))
    clean = logits.clone()
    logits[0, CHUNK + 1], logits[1], logits[2, 0] = NAN, -INF, INF
    ids = torch.tensor([1, 2, 3, 4])
    ours = kernels.compute_logprobs(logits.to(device), ids.to(device), 3)
    assert ours.logprobs[:3].isfinite().sum() == 0
    last = LogprobsOutput(*(x[3:].cpu() for x in ours))
    assert_same(clean[3:], last, compute_logprobs_reference(clean[3:], ids[3:], 3))


def test_ids_out_of_range_and_masked_tokens(device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, -INF, 2.0]]).repeat(5, 1).to(device)
    ids = torch.tensor([-1, 4, 2, 3, 0], dtype=torch.int32, device=device)
    for output in (kernels.compute_logprobs(logits, ids, 1), compute_logprobs_reference(logits, ids, 1)):
        assert output.ranks.tolist() == [0, 0, 4, 2, 3]
        assert output.logprobs[:2].isnan().all() and output.logprobs[2].item() == -INF
        assert output.top_logprobs.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whole_vocabularies_on_a_gpu(device: str, dtype: torch.dtype) -> None:
    logits = torch.randn(40, 151_936, device=device).mul(4).to(dtype)
    ids = torch.randint(0, 151_936, (40,), device=device)
    assert_same(logits, kernels.compute_logprobs(logits, ids, 20), compute_logprobs_reference(logits, ids, 20))


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
