from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from support.kernels.kernel_harness import RATIO, assert_close
from tidewheel_kernels import (
    PenaltyTensors,
    TokenHistory,
    WordTensors,
    apply_logit_bias,
    apply_penalties,
    forbid_words,
)
from tidewheel_kernels.penalties import cpu
from tidewheel_kernels.penalties.cpu import apply_penalties_cpu
from tidewheel_kernels.penalties.reference import (
    apply_logit_bias_reference,
    apply_penalties_reference,
    forbid_words_reference,
)
from tidewheel_kernels.penalties.triton_kernels import apply_logit_bias as bias_triton
from tidewheel_kernels.penalties.triton_kernels import apply_penalties as penalties_triton
from tidewheel_kernels.penalties.triton_kernels import forbid_words as words_triton

INF, NAN = float("inf"), float("nan")


class Case(NamedTuple):
    history: TokenHistory
    penalties: PenaltyTensors


def case(device: str, lengths: list[int], vocabulary: int, seed: int = 0) -> Case:
    """Every row but the last has penalties, listed backwards; a history repeats tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(lengths) - 1
    tokens = torch.randint(0, vocabulary, (sum(lengths) + 1,), generator=generator)
    tokens = tokens.where(torch.rand(tokens.shape, generator=generator) < 0.5, tokens % 5)
    rows = torch.arange(num_rows).flip(0)
    num_tokens = torch.tensor(lengths)[rows]
    shares = torch.rand(num_rows, generator=generator)
    return Case(
        TokenHistory(tokens.int().to(device), torch.tensor(lengths).cumsum(0).to(device)),
        PenaltyTensors(
            rows=rows.int().to(device),
            num_prompt_tokens=(shares * (num_tokens + 1)).int().to(device),
            num_tokens=num_tokens.int().to(device),
            repetition=(torch.rand(num_rows, generator=generator) + 0.5).to(device),
            presence=torch.randn(num_rows, generator=generator).to(device),
            frequency=torch.randn(num_rows, generator=generator).to(device),
            max_num_tokens=int(num_tokens.max()) + 3,
        ),
    )


def by_hand(logits: torch.Tensor, history: TokenHistory, penalties: PenaltyTensors) -> torch.Tensor:
    """The definition, one token after the other, in float64."""
    result, tokens, ends = logits.double().clone(), history.tokens.tolist(), history.ends.tolist()
    columns = (penalties.rows, penalties.num_prompt_tokens, penalties.num_tokens)
    factors = (penalties.repetition, penalties.presence, penalties.frequency)
    for row, num_prompt, count, repetition, presence, frequency in zip(
        *(column.tolist() for column in columns + factors), strict=True
    ):
        mine = tokens[ends[row] - count : ends[row]]
        output = Counter(mine[num_prompt:])
        for token in {token for token in mine if 0 <= token < logits.shape[1]}:
            value = result[row, token].item()
            value = value / repetition if value > 0 else value * repetition
            result[row, token] = value - frequency * output[token] - presence * (output[token] > 0)
    return result


@pytest.fixture(params=["triton", "cpu", "reference"])
def penalise(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(cpu, "MAX_COUNTS", 2000)  # two rows of 1,000
    return {"triton": penalties_triton, "cpu": apply_penalties_cpu, "reference": apply_penalties_reference}[
        request.param
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "vocabulary"), [([1, 1], 3), ([7, 1, 63, 2], 1000), ([700, 256, 1, 3], 97)], ids=str
)
def test_penalties_equal_their_definition(
    penalise: Callable[..., None], device: str, lengths: list[int], vocabulary: int, dtype: torch.dtype
) -> None:
    history, penalties = case(device, lengths, vocabulary)
    ours = torch.randn(len(lengths), vocabulary, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    before = ours.clone()
    penalise(ours, history, penalties)
    expected = by_hand(before.cpu(), history, penalties)
    assert_close("logits", expected.to(dtype), ours.cpu(), RATIO[dtype])
    assert torch.equal(ours[-1], before[-1]), "a row without penalties"


def test_tokens_out_of_range_change_nothing(penalise: Callable[..., None], device: str) -> None:
    lengths, vocabulary = [7, 300, 3, 1], 97
    history, penalties = case(device, lengths, vocabulary)
    wrong = torch.tensor([vocabulary, -5, -1, 2**31 - 1, vocabulary + 1], dtype=torch.int32, device=device)
    history.tokens[::3] = wrong.repeat(21)[:104]
    history.tokens[307:310] = wrong[:3]  # all of a row
    memory = torch.randn(len(lengths), 3 * vocabulary, generator=torch.Generator().manual_seed(1)).to(device)
    before = memory.clone()
    logits = memory[:, vocabulary : 2 * vocabulary]
    expected = by_hand(logits.cpu(), history, penalties).float()
    penalise(logits, history, penalties)
    assert_close("logits", expected, logits.cpu(), RATIO[torch.float32])
    logits.copy_(before[:, vocabulary : 2 * vocabulary])
    assert torch.equal(memory, before), "a logit of another token"


def test_a_kernel_changes_each_logit_once(device: str) -> None:
    """A token that occurs in many tiles, in prompt and output."""
    history = TokenHistory(torch.full((2000,), 4, dtype=torch.int32, device=device), torch.tensor([2000]).to(device))
    one = torch.tensor([1.0], device=device)
    rows, num_prompt, num_tokens = (torch.tensor([x], dtype=torch.int32, device=device) for x in (0, 700, 2000))
    penalties = PenaltyTensors(2000, rows, num_prompt, num_tokens, 2 * one, one, one)
    logits = torch.full((1, 9), 10.0, device=device)
    penalties_triton(logits, history, penalties)
    assert logits.tolist() == [[10.0] * 4 + [10.0 / 2 - 1300 - 1] + [10.0] * 4]


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
    history = TokenHistory(torch.tensor([2, 0, 1, 2, 1, 2, 1, 3]).int(), torch.tensor([7, 8]))
    columns = PenaltyTensors(
        rows=torch.tensor([0, 1]).int(),
        num_prompt_tokens=torch.tensor([2, 0]).int(),
        num_tokens=torch.tensor([7, 1]).int(),
        repetition=torch.tensor([2.0, 1.0]),
        presence=torch.tensor([0.5, 0.0]),
        frequency=torch.tensor([0.25, 0.0]),
        max_num_tokens=7,
    )
    apply_penalties(logits, history, columns)
    assert logits.tolist() == [[1.0, -4.0 - 0.75 - 0.5, 1.0 - 0.5 - 0.5, 5.0], [1.0, 1.0, 1.0, 1.0]]


@pytest.fixture(params=["triton", "reference"])
def forbid(request: pytest.FixtureRequest) -> Callable[..., None]:
    return {"triton": words_triton, "reference": forbid_words_reference}[request.param]


def words(device: str, rows: list[int], sequences: list[list[int]]) -> WordTensors:
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    columns = (
        torch.tensor(rows),
        lengths.cumsum(0) - lengths,
        lengths,
        torch.tensor([token for sequence in sequences for token in sequence]),
    )
    return WordTensors(*(column.int().to(device) for column in columns))


def test_only_the_last_token_of_a_word_that_the_row_ends_with_is_forbidden(
    forbid: Callable[..., None], device: str
) -> None:
    history = TokenHistory(
        torch.tensor([9, 1, 2, 3, 2, 3], dtype=torch.int32, device=device), torch.tensor([4, 6], device=device)
    )
    chosen = {
        0: [[1, 2, 3, 5], [2, 3, 6], [2, 3, 6], [3, 2, 7], [4]],
        1: [[2, 3, 8], [3, 3, 1], [3, 300], [3, -1], [3, 299]],
    }
    rows = [row for row, sequences in chosen.items() for _ in sequences]
    logits = torch.zeros(3, 300, device=device)
    forbid(logits, history, words(device, rows, [*chosen[0], *chosen[1]]))
    forbidden = {(row, token) for row, token in (logits == -INF).nonzero().tolist()}
    assert forbidden == {(0, 5), (0, 6), (0, 4), (1, 8), (1, 299)}
    assert (logits.isinf() | (logits == 0)).all()


@pytest.mark.parametrize("length", [2, 31, 32, 33, 34, 100])
def test_words_of_many_tokens(forbid: Callable[..., None], device: str, length: int) -> None:
    """One differs in its first token, one before its last, one not at all."""
    text = torch.randint(0, 50, (length - 1,), generator=torch.Generator().manual_seed(length)).tolist()
    near = [[text[0] + 1, *text[1:], 7], [*text[:-1], text[-1] + 1, 8], [*text, 9]]
    history = TokenHistory(torch.tensor([3, *text]).int().to(device), torch.tensor([length], device=device))
    logits = torch.ones(1, 60, device=device)
    forbid(logits, history, words(device, [0] * 3, near))
    assert (logits == -INF).nonzero().tolist() == [[0, 9]]


def test_a_forbidden_token_that_is_not_finite_still_shows(forbid: Callable[..., None], device: str) -> None:
    history = TokenHistory(torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([1], device=device))
    logits = torch.tensor([[NAN, INF, 1.0]], device=device)
    forbid(logits, history, words(device, [0] * 4, [[0], [1], [2], [0]]))
    assert logits[0, :2].isnan().all() and logits[0, 2] == -INF


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
    history = TokenHistory(none, torch.zeros(1, dtype=torch.int64))
    apply_penalties(logits, history, PenaltyTensors(0, none, none, none, *[torch.zeros(0)] * 3))
    forbid_words(logits, history, WordTensors(none, none, none, none))
    assert logits.tolist() == [[1.0] * 4]
    with pytest.raises(TypeError, match="float32"):
        apply_logit_bias(logits.half(), none, none, torch.zeros(0))
