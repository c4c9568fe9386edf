"""Columns of new tokens, against a dict of lists."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tidewheel.frontend.live_request import TokenColumns


def add(columns: TokenColumns, tokens: dict[int, int], now_ns: int) -> tuple[list[float], list[int]]:
    seconds, first = columns.add(np.array(list(tokens), np.int64), np.array(list(tokens.values()), np.int32), now_ns)
    return seconds.tolist(), first


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_taken_once_in_its_order(seed: int) -> None:
    rng = random.Random(seed)
    columns = TokenColumns()
    expected: dict[int, list[int]] = {}
    closed: list[int] = []
    for now_ns in range(1, 2000):
        if rng.random() < 0.3:
            expected[columns.open()] = []
        keys = rng.sample(sorted(expected), rng.randint(0, len(expected)))
        tokens = {key: rng.randrange(100) for key in keys}
        late = rng.sample(closed, min(len(closed), 2))  # the engine has not heard yet
        add(columns, tokens | dict.fromkeys(late, 7), now_ns)
        for key, token in tokens.items():
            expected[key].append(token)
        for key in rng.sample(sorted(expected), min(len(expected), 2)):
            assert columns.take(key, now_ns) == expected[key]
            expected[key] = []
        if len(expected) > 40:
            key = rng.choice(sorted(expected))
            columns.close(key)
            closed.append(key)
            del expected[key]
            assert columns.take(key, now_ns) == []
    for key, tokens_left in expected.items():
        assert columns.take(key, 9999) == tokens_left


def test_times_of_tokens() -> None:
    columns = TokenColumns()
    first, second = columns.open(), columns.open()
    assert add(columns, {first: 5}, 1_000_000_000) == ([], [first])
    assert add(columns, {first: 5, second: 6}, 1_500_000_000) == ([0.5], [second])
    assert columns.note_token(first, 2_000_000_000) == 1_500_000_000
    assert add(columns, {first: 5, second: 6}, 2_500_000_000) == ([0.5, 1.0], [])
    columns.close(first)
    assert columns.note_token(first, 3_000_000_000) == 0


def test_who_waits_longest_is_due_first_and_only_once() -> None:
    columns = TokenColumns()
    keys = [columns.open() for _ in range(4)]
    for key in keys:
        columns.await_tokens(key)
    assert columns.due(10) == [] and columns.next_taken_ns() is None  # no news
    for at, key in enumerate((keys[2], keys[0], keys[1], keys[3]), start=1):
        columns.take(key, at)
    add(columns, dict.fromkeys(keys[:3], 5), 5)
    assert columns.next_taken_ns() == 1
    assert columns.due(2) == [keys[2], keys[0]]
    assert columns.due(2) == [] and columns.next_taken_ns() == 3
    columns.await_tokens(keys[0])
    assert columns.due(9) == [keys[0], keys[1]]
    columns.close(keys[3])
    columns.await_tokens(keys[3])
    assert columns.num_awaited() == 0


def test_the_slot_of_a_closed_request_is_used_again_under_another_key() -> None:
    columns = TokenColumns()
    before = columns.open()
    columns.close(before)
    columns.close(before)  # twice does not free it twice
    keys = [columns.open() for _ in range(600)]
    assert before not in keys and len(set(keys)) == 600
    add(columns, {before: 1, keys[0]: 2}, 1)
    assert [columns.take(key, 2) for key in keys] == [[2], *([[]] * 599)]
