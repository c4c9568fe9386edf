"""Prompt lookup against a search through all tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.batch import Int32Array
from tidewheel.scheduler import prompt_lookup
from tidewheel.scheduler.prompt_lookup import MATCH_KINDS, MAX_MATCH, PromptLookup
from tidewheel.scheduler.speculation import NUM_OTHER_KINDS

NUM_ROWS, MOST, MAX_MODEL_LEN = 3, 6, 96
VOCABULARY = range(1, 4)
RUN_SIZES = (4, 2, 1)


def ids(token_ids: Sequence[int]) -> Int32Array:
    return np.array(token_ids, dtype=np.int32)


def num_matching(tokens: Sequence[int], end: int) -> int:
    """Return how many tokens before `end` are the last of all."""
    agree = (end - n > 0 and tokens[end - 1 - n] == tokens[-1 - n] for n in range(MAX_MATCH))
    return sum(itertools.takewhile(bool, agree))


def continued(tokens: Sequence[int], end: int) -> list[int]:
    """Return `MOST` tokens that follow `end`, again and again where they reach the last token."""
    return list(itertools.islice(itertools.cycle(tokens[end:]), MOST))


class NaiveRow:
    """A row's tokens and the end of its last match, searched from the last token back."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.distance = 1

    def candidates(self) -> list[int]:
        ends = range(len(self.tokens) - 1, 0, -1)
        lasts = (next((end for end in ends if num_matching(self.tokens, end) >= size), 0) for size in RUN_SIZES)
        return [len(self.tokens) - self.distance, *lasts]

    def propose(self) -> tuple[int, list[int]]:
        """Return how many tokens match, and the tokens that follow."""
        best = max(self.candidates(), key=lambda end: num_matching(self.tokens, end))
        matching = num_matching(self.tokens, best)
        if matching:
            self.distance = len(self.tokens) - best
        return matching, continued(self.tokens, best) if matching else []


def proposed(lookup: PromptLookup, rows: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return kind (-1: nothing is proposed) and drafts of each row."""
    counts, token_ids, kinds = lookup.propose(np.array(rows, dtype=np.intp))
    assert counts.dtype == token_ids.dtype == kinds.dtype == np.int32
    assert token_ids.shape == (len(rows), MOST)
    drafts = [row[:count] for row, count in zip(token_ids.tolist(), counts.tolist(), strict=True)]
    return [(kind if row else -1, row) for kind, row in zip(kinds.tolist(), drafts, strict=True)]


def expected(row: NaiveRow) -> tuple[int, list[int]]:
    matching, drafts = row.propose()
    return (int(MATCH_KINDS[matching]), drafts) if matching else (-1, [])


tokens_of = st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=24)
chunks_of = st.dictionaries(st.integers(0, NUM_ROWS - 1), tokens_of, min_size=1)


@pytest.fixture
def large_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every run of the vocabulary a slot of its own."""
    monkeypatch.setattr(prompt_lookup, "_LEAST_SLOTS", 1 << 16)
    lookup = PromptLookup(1, MAX_MODEL_LEN, MOST)
    lookup.enter(0, ids([1]))
    runs = np.array(list(itertools.product((-1, *VOCABULARY), repeat=4)), dtype=np.int32)
    slots = lookup._slots_of(runs, 0)
    distinct = {
        (size, *run[:size]): slot
        for run, of_sizes in zip(runs.tolist(), slots.tolist(), strict=True)
        for size, slot in zip(RUN_SIZES, of_sizes, strict=True)
    }
    assert len(set(distinct.values())) == len(distinct)


def append(lookup: PromptLookup, chunks: dict[int, list[int]]) -> None:
    rows = [row for row, tokens in chunks.items() for _ in tokens]
    lookup.append(np.array(rows, dtype=np.intp), ids(list(itertools.chain.from_iterable(chunks.values()))))


@pytest.mark.usefixtures("large_tables")
def test_drafts_are_those_of_a_search() -> None:
    @settings(max_examples=150)
    @given(st.lists(tokens_of, min_size=NUM_ROWS, max_size=NUM_ROWS), st.lists(chunks_of, max_size=8))
    def run(prompts: list[list[int]], steps: list[dict[int, list[int]]]) -> None:
        lookup, naive = PromptLookup(NUM_ROWS, MAX_MODEL_LEN, MOST), [NaiveRow(prompt) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            lookup.enter(row, ids(prompt))
        assert proposed(lookup, range(NUM_ROWS)) == [expected(row) for row in naive]
        for chunks in steps:
            for row, tokens in list(chunks.items()):
                if len(naive[row].tokens) + len(tokens) > MAX_MODEL_LEN:  # another request takes the row
                    naive[row] = NaiveRow(chunks.pop(row))
                    lookup.enter(row, ids(naive[row].tokens))
                else:
                    naive[row].tokens += tokens
            append(lookup, chunks)
            rows = list(chunks)[::-1]
            assert proposed(lookup, rows) == [expected(naive[row]) for row in rows]

    run()


@pytest.mark.usefixtures("large_tables")
def test_as_many_tokens_match_as_a_run_of_the_table_has() -> None:
    @given(st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=MAX_MODEL_LEN))
    def run(tokens: list[int]) -> None:
        lookup = PromptLookup(1, MAX_MODEL_LEN, MOST)
        lookup.enter(0, ids(tokens))
        [(kind, drafts)] = proposed(lookup, [0])
        longest = max((num_matching(tokens, end) for end in range(1, len(tokens))), default=0)
        found = next((size for size in RUN_SIZES if size <= longest), 0)
        if found:
            assert MATCH_KINDS[found] <= kind <= MATCH_KINDS[longest]
        else:
            assert drafts == []

    run()


def test_tables_that_are_small_and_grow_never_invent_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "_LEAST_SLOTS", 4)
    rng = np.random.default_rng(1)
    lookup = PromptLookup(NUM_ROWS, 1000, MOST)
    tokens = [rng.integers(5, size=5).tolist() for _ in range(NUM_ROWS)]
    for row in range(NUM_ROWS):
        lookup.enter(row, ids(tokens[row]))
    num_drafts = 0
    for _ in range(300):
        chunks = {int(row): rng.integers(5, size=rng.integers(1, 4)).tolist() for row in rng.permutation(NUM_ROWS)}
        append(lookup, chunks)
        for row, chunk in chunks.items():
            tokens[row] += chunk
        for row, (kind, drafts) in enumerate(proposed(lookup, range(NUM_ROWS))):
            ends = range(1, len(tokens[row]))
            assert not drafts or any(
                MATCH_KINDS[num_matching(tokens[row], end)] == kind and continued(tokens[row], end) == drafts
                for end in ends
                if num_matching(tokens[row], end)
            )
            num_drafts += len(drafts)
    assert num_drafts > 0.95 * 300 * NUM_ROWS * MOST


def test_a_loop_goes_on() -> None:
    lookup = PromptLookup(1, 100, MOST)
    lookup.enter(0, ids([9, 1, 2, 3, 1, 2, 3]))
    assert proposed(lookup, [0]) == [(MATCH_KINDS[3], [1, 2, 3, 1, 2, 3])]
    lookup.append(np.array([0, 0, 0]), ids([1, 1, 1]))
    assert proposed(lookup, [0]) == [(MATCH_KINDS[2], [1] * MOST)]


def test_a_match_goes_on_beside_later_ones_of_the_same_run() -> None:
    head, copied = [5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 11, 12]
    lookup = PromptLookup(1, 100, 2)
    lookup.enter(0, ids([*copied, *head, 20, *head, 21, *copied[:4]]))
    drafts = []
    for token in copied[4:8]:
        drafts.append(lookup.propose(np.array([0])).token_ids[0, 0])
        lookup.append(np.array([0]), ids([token]))
    assert drafts == copied[4:8]
    assert lookup.propose(np.array([0])).token_ids.tolist() == [[11, 12]]


def test_a_row_that_is_entered_again_begins_anew() -> None:
    lookup = PromptLookup(2, 100, MOST)
    lookup.enter(1, ids([1, 2, 3, 4, 5, 6, 1, 2, 3]))
    assert proposed(lookup, [1])[0][1] == [4, 5, 6, 1, 2, 3]
    lookup.enter(1, ids([1, 2, 3]))
    assert proposed(lookup, [1]) == [(-1, [])]


def test_a_match_of_the_request_before_does_not_reach_into_another_row() -> None:
    lookup = PromptLookup(2, 20, MOST)
    lookup.enter(0, ids([7] * 20))
    lookup.enter(1, ids([7, *range(10, 28), 7]))
    assert proposed(lookup, [1])[0][1] == [10, 11, 12, 13, 14, 15]
    lookup.enter(1, ids([7]))
    assert proposed(lookup, [1]) == [(-1, [])]


def test_a_context_may_be_full() -> None:
    lookup = PromptLookup(2, 8, MOST)
    for row in (1, 0):
        lookup.enter(row, ids([1, 2, 3, 1, 2, 3, 1]))
    for _ in range(2):
        append(lookup, {0: [2], 1: [7]})
    assert proposed(lookup, [0, 1]) == [(0, [2] * MOST), (0, [7] * MOST)]


def test_a_step_without_rows_is_empty() -> None:
    lookup = PromptLookup(2, 8, MOST)
    append(lookup, {})
    assert proposed(lookup, []) == []


def test_every_match_has_a_kind() -> None:
    assert MATCH_KINDS.tolist() == sorted(MATCH_KINDS.tolist())
    assert set(MATCH_KINDS.tolist()) == set(range(NUM_OTHER_KINDS))
