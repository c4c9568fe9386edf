from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.kernels.interpreted_runs import fewer
from support.kernels.sampling_rows import GREEDY, Row, possible_draws, tensors
from tidewheel_kernels import SamplingTensors, sample
from tidewheel_kernels.sampling.cpu import NUM_CANDIDATES, greedy_tokens_cpu, sample_cpu
from tidewheel_kernels.sampling.reference import filtered_weights, greedy_tokens, sample_reference
from tidewheel_kernels.sampling.triton_kernels import sample as sample_triton

Implementation = Callable[[torch.Tensor, SamplingTensors, torch.Tensor], torch.Tensor]
INF, NAN = float("inf"), float("nan")


ROWS = [
    Row(),
    GREEDY,
    Row(0.7, top_k=1),
    Row(0.7, top_k=5),
    Row(1.3, top_p=0.9),
    Row(1.0, top_p=0.0),
    Row(1.0, min_p=0.1),
    Row(1.0, min_p=1.0),
    Row(0.8, top_k=20, top_p=0.8, min_p=0.02),
    Row(2.0, top_k=10**6, top_p=0.999),
]


@pytest.fixture(params=["triton", "cpu", "reference"])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return {"triton": sample_triton, "cpu": sample_cpu, "reference": sample_reference}[request.param]


@pytest.fixture
def where(implementation: Implementation, device: str) -> str:
    return device if implementation is sample_triton else "cpu"


def quantiles(logits: torch.Tensor, params: SamplingTensors, ids: torch.Tensor) -> torch.Tensor:
    """For each row a number in the middle of the interval that draws token ids[row]."""
    weights = filtered_weights(logits.cpu(), params).double()
    cumulative = weights.cumsum(-1)
    chosen = ids.unsqueeze(-1)
    middle = cumulative.gather(-1, chosen) - weights.gather(-1, chosen) / 2
    return (middle / cumulative[:, -1:]).squeeze(-1).float()


@pytest.mark.parametrize("vocabulary", [1, 63, 1000, 8195])
def test_draws_equal_the_reference(implementation: Implementation, where: str, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(len(ROWS), vocabulary, generator=generator) * 3
    host = tensors(ROWS)
    likely = filtered_weights(logits, host).topk(min(fewer(2, 4), vocabulary), dim=-1)
    # Where fewer tokens are kept, the most likely one is drawn again.
    candidates = likely.indices.where(likely.values > 0, likely.indices[:, :1])
    for ids in candidates.unbind(-1):
        uniform = quantiles(logits, host, ids)
        got = implementation(logits.to(where), tensors(ROWS, where), uniform.to(where)).cpu()
        expected = sample_reference(logits, host, uniform)
        assert torch.equal(got, expected)
        drawn = host.temperature > 0
        assert torch.equal(got[drawn], ids[drawn])


@pytest.mark.parametrize("row", [row for row in ROWS if row != GREEDY], ids=str)
def test_every_kept_token_is_drawn_in_its_share(implementation: Implementation, where: str, row: Row) -> None:
    vocabulary, draws = 20, 50
    logits = (torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(3)) * 2).expand(draws, -1)
    uniform = (torch.arange(draws) + 0.5) / draws
    got = implementation(logits.contiguous().to(where), tensors([row] * draws, where), uniform.to(where)).cpu()
    weights = filtered_weights(logits[:1], tensors([row]))[0]
    share = torch.bincount(got, minlength=vocabulary) / draws
    assert (share - weights / weights.sum()).abs().max() <= 1.01 / draws
    assert (share[weights == 0] == 0).all()


def test_a_row_does_not_depend_on_its_batch(implementation: Implementation, where: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(len(ROWS), 500, generator=generator) * 2).to(where)
    uniform = torch.rand(len(ROWS), generator=generator).to(where)
    together = implementation(logits, tensors(ROWS, where), uniform)
    for i, row in enumerate(ROWS):
        alone = implementation(logits[i : i + 1], tensors([row], where), uniform[i : i + 1])
        assert alone.item() == together[i].item()


@pytest.mark.parametrize("row", [GREEDY, Row(), Row(1.0, top_k=3, top_p=0.9, min_p=0.1)], ids=str)
def test_unusable_rows_fail_alone(implementation: Implementation, where: str, row: Row) -> None:
    logits = torch.zeros(5, 100)
    logits[0, 99], logits[1, 5], logits[2], logits[3, 7], logits[4, :-1] = NAN, INF, -INF, 50.0, -INF
    uniform = torch.full((5,), 0.5, device=where)
    for rows in ([row] * 5, [row, Row(), row, row, row]):
        assert implementation(logits.to(where), tensors(rows, where), uniform).tolist() == [-1, -1, -1, 7, 99]


def test_greedy_takes_the_first_of_equals(implementation: Implementation, where: str) -> None:
    logits = torch.zeros(2, 300, device=where)
    logits[:, [250, 70, 299]] = 5.0
    uniform = torch.full((2,), 0.9, device=where)
    assert implementation(logits, tensors([GREEDY, GREEDY], where), uniform).tolist() == [70, 70]
    assert implementation(logits, tensors([GREEDY, Row(top_k=2)], where), uniform)[0].item() == 70


@pytest.mark.parametrize("vocabulary", [50, 128, 32_000, 32_127])
def test_greedy_tokens_of_many_logits(vocabulary: int) -> None:
    num_rows = 8
    logits = torch.randint(-500, 500, (num_rows, vocabulary), generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[0, vocabulary // 2] = NAN
    logits[1, -1] = float("inf")
    logits[2] = -float("inf")
    logits[3] = -float("inf")
    logits[3, -1] = 0.0
    ours, expected = greedy_tokens_cpu(logits), greedy_tokens(logits)
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert torch.equal(ours.max_logit[1:], expected.max_logit[1:])
    assert ours.token_ids[:4].tolist() == [-1, -1, -1, vocabulary - 1]


def test_ties_at_a_threshold_are_all_kept(implementation: Implementation, where: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, -INF, 1.0]]).repeat(6, 1).to(where)
    uniform = ((torch.arange(6) + 0.5) / 6).to(where)
    for row in (Row(top_k=2), Row(top_p=0.5)):
        got = implementation(logits, tensors([row] * 6, where), uniform)
        assert set(got.tolist()) == {1, 2, 3, 5}


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24])
def test_the_ends_of_the_unit_interval(implementation: Implementation, where: str, uniform: float) -> None:
    logits = torch.tensor([[-INF, -100.0, 0.0, 0.1, -200.0, -INF]], device=where)
    for row in (Row(), Row(top_k=2)):
        token = implementation(logits, tensors([row], where), torch.tensor([uniform], device=where)).item()
        assert token == (2 if uniform == 0.0 and row.top_k else 3 if uniform else token)
        assert 0 < token < 5


def test_extreme_logits_and_temperatures(implementation: Implementation, where: str) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 1e-40], [1e4, 1e4 - 1, 0.0, -1e4]]).to(where)
    uniform = torch.full((2,), 0.2, device=where)
    for row in (Row(1e-4), Row(1e-4, top_k=2, top_p=0.9), Row(100.0, top_k=1)):
        assert implementation(logits, tensors([row] * 2, where), uniform).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_logits(implementation: Implementation, where: str, dtype: torch.dtype) -> None:
    logits = (torch.randn(len(ROWS), 300, generator=torch.Generator().manual_seed(5)) * 2).to(dtype)
    host = tensors(ROWS)
    uniform = quantiles(logits, host, filtered_weights(logits, host).argmax(-1))
    got = implementation(logits.to(where), tensors(ROWS, where), uniform.to(where)).cpu()
    assert torch.equal(got, sample_reference(logits, host, uniform))


@pytest.mark.parametrize("row", [Row(top_p=0.99), Row(top_k=NUM_CANDIDATES + 1), Row(top_k=3000, top_p=0.5)], ids=str)
def test_cpu_sorts_where_the_candidates_do_not_suffice(row: Row) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(8, 4000, generator=generator)
    rows = [row, Row(top_k=5), Row(), Row(top_p=0.01)] * 2
    uniform = torch.rand(8, generator=generator)
    params = tensors(rows)
    possible = [possible_draws(*case) for case in zip(logits, rows, uniform.tolist(), strict=True)]
    assert all(len(tokens) == 1 for tokens in possible), "rounding may decide here: choose another seed"
    for sampler in (sample_cpu, sample_reference):
        assert [{token} for token in sampler(logits, params, uniform).tolist()] == possible


def test_reference_keeps_the_smallest_set_that_reaches_top_p() -> None:
    """Every threshold lies off a sum of weights by more than the logarithm and the exponential may round."""
    logits = torch.tensor([[0.12, 0.5, 0.3, 0.08]]).log()
    kept_at = {0.4: [1], 0.49: [1], 0.51: [1, 2], 0.79: [1, 2], 0.81: [0, 1, 2], 0.91: [0, 1, 2], 0.93: [0, 1, 2, 3]}
    for top_p, kept in kept_at.items():
        weights = filtered_weights(logits, tensors([Row(top_p=top_p)]))
        assert weights[0].nonzero().squeeze(-1).tolist() == kept


def test_reference_applies_top_p_to_what_top_k_left() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    weights = filtered_weights(logits, tensors([Row(top_k=2, top_p=0.55)]))
    assert weights[0].nonzero().squeeze(-1).tolist() == [1]


def test_shapes_are_checked_and_an_empty_batch_is_fine() -> None:
    empty = tensors([Row()])
    assert sample(torch.zeros(0, 9), empty, torch.zeros(0)).token_ids.shape == (0,)
    with pytest.raises(ValueError, match=r"uniform \[B\]"):
        sample(torch.zeros(2, 9), empty, torch.zeros(3))
