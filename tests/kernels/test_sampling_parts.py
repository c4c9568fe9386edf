"""Tokens from what parts of the vocabulary contribute are those of whole logits, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.kernels.sampling_rows import GREEDY, Row, tensors
from support.long_runs import examples
from tidewheel_kernels import SamplingTensors
from tidewheel_kernels.sampling import cpu
from tidewheel_kernels.sampling.cpu import NUM_CANDIDATES, UNSETTLED, sample_cpu
from tidewheel_kernels.sampling.parts import candidates_of_part, draw_from_parts, largest_of_part, largest_tokens
from tidewheel_kernels.sampling.reference import greedy_tokens

INF, NAN = float("inf"), float("nan")
NUM_ROWS = 12


def drawn_from_parts(
    logits: torch.Tensor, num_parts: int, params: SamplingTensors, uniform: torch.Tensor
) -> torch.Tensor:
    size = logits.shape[1] // num_parts
    parts = [candidates_of_part(part, i * size, params) for i, part in enumerate(logits.split(size, dim=1))]
    return draw_from_parts(torch.stack(parts), params, uniform, logits.shape[1])


def largest_from_parts(logits: torch.Tensor, num_parts: int) -> torch.Tensor:
    size = logits.shape[1] // num_parts
    return largest_tokens(
        torch.stack([largest_of_part(x, i * size) for i, x in enumerate(logits.split(size, dim=1))])
    )


def random_logits(random: np.random.Generator, vocabulary: int) -> torch.Tensor:
    """Return rows, flat and peaked, of which half have many ties and some a value that is no number."""
    values = random.standard_normal((NUM_ROWS, vocabulary)) * random.choice([0.3, 2.0, 8.0], (NUM_ROWS, 1))
    values[::2] = np.round(values[::2] * 4) / 4
    for row in np.flatnonzero(random.random(NUM_ROWS) < 0.1):
        values[row, random.integers(vocabulary)] = random.choice([NAN, INF])
    values[random.random((NUM_ROWS, vocabulary)) < random.choice([0.0, 0.5])] = -INF
    return torch.from_numpy(values).float()


def random_row(random: np.random.Generator) -> Row:
    def some(*values: float) -> float:
        return float(random.choice(values))

    temperature = some(0, 0.01, 0.6, 1, 1, 5)
    return Row(
        temperature, int(some(0, 0, 1, 20, 250, 256, 257, 258)), some(1, 1, 0.1, 0.8, 0.99), some(0, 0, 0.05, 1)
    )


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("vocabulary", [12, 384, 3000])
def test_draws_are_those_of_whole_logits(vocabulary: int, num_parts: int) -> None:
    num_settled = num_drawn = 0
    for seed in range(examples(60, 3000)):
        random = np.random.default_rng((seed, vocabulary))
        logits, params = random_logits(random, vocabulary), tensors([random_row(random) for _ in range(NUM_ROWS)])
        uniform = torch.from_numpy(random.random(NUM_ROWS, dtype=np.float32))
        drawn, expected = drawn_from_parts(logits, num_parts, params, uniform), sample_cpu(logits, params, uniform)
        settled = drawn != UNSETTLED
        assert torch.equal(drawn[settled], expected[settled]), seed
        num_settled, num_drawn = num_settled + int(settled.sum()), num_drawn + NUM_ROWS
        largest = greedy_tokens(logits).token_ids
        assert torch.equal(largest_from_parts(logits, num_parts), largest), seed
        is_greedy = params.temperature == 0
        assert torch.equal(expected[is_greedy], largest[is_greedy])
    assert num_settled > 0.4 * num_drawn, "most rows fall back, and the test shows little"


def test_ties_beyond_the_candidates_leave_a_row_unsettled() -> None:
    """Whole logits keep all that equal the last kept one; the lowest of equals is greedy."""
    logits = torch.zeros(3, 1000)
    logits[2, :20] = 1.0
    params = tensors([Row(top_k=3), GREEDY, Row(top_k=3)])
    uniform = torch.tensor([0.9, 0.9, 0.99])
    assert drawn_from_parts(logits, 2, params, uniform).tolist() == [UNSETTLED, UNSETTLED, 19]
    assert sample_cpu(logits, params, uniform).tolist() == [900, 0, 19]
    assert largest_from_parts(logits, 2).tolist() == [0, 0, 0]


def test_a_sum_that_is_near_a_threshold_leaves_a_row_unsettled() -> None:
    """Sums of parts round unlike the sum of the row."""
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log().repeat(2, 1)
    logits = torch.cat((logits, torch.full((2, 996), -50.0)), dim=1)
    params, uniform = tensors([Row(top_p=0.7 + 1e-7), Row(top_p=0.69)]), torch.tensor([0.5, 0.5])
    assert drawn_from_parts(logits, 2, params, uniform).tolist() == [UNSETTLED, 1]


def test_filters_that_keep_few_tokens_need_no_whole_logits() -> None:
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.standard_normal((64, 20_000))).float() * 3
    for row in (
        Row(top_k=20, top_p=0.8),
        Row(0.6, top_k=NUM_CANDIDATES - 1),
        Row(0.5, top_p=0.5),
        Row(min_p=0.1),
        GREEDY,
    ):
        uniform = torch.from_numpy(random.random(64, dtype=np.float32))
        assert int((drawn_from_parts(logits, 2, tensors([row] * 64), uniform) == UNSETTLED).sum()) <= 4


def test_min_p_alone_searches_no_candidates_of_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 49,152 flat logits, a search takes twice as long as the draw after it."""
    logits = torch.zeros(1, 1000)
    logits[0, :400] = 1.0
    params, uniform = tensors([Row(min_p=0.5)]), torch.tensor([0.5])
    monkeypatch.delattr(cpu, "candidates_of")
    assert sample_cpu(logits, params, uniform).tolist() == [200]
