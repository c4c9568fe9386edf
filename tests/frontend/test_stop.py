"""Stop strings against a checker that looks at the whole text after every character."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.frontend.output import StopChecker

letters = st.text(alphabet="ab🎉", max_size=40)
stop_lists = st.lists(st.text(alphabet="ab🎉", min_size=1, max_size=5), max_size=5)


def naive(text: str, stops: list[str], *, include: bool, first: int = 0) -> tuple[str, bool]:
    """What is output, and whether a stop string ended it; one that ends at or before `first` does not count."""
    for end in range(first + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end if include else end - len(max(hits, key=len))], True
    return text, False


def run(text: str, stops: list[str], cuts: list[int], *, include: bool, first: int = 0) -> tuple[list[str], bool]:
    checker = StopChecker(stops, include_in_output=include)
    edges = sorted({0, first, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [checker.push(text[a:b], may_stop=a >= first) for a, b in pairwise(edges)]
    return [*pieces, checker.flush()], checker.is_hit


@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(1, 40)), include=st.booleans())
def test_equals_naive_however_it_is_cut(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    pieces, hit = run(text, stops, cuts, include=include)
    assert ("".join(pieces), hit) == naive(text, stops, include=include)


@given(text=letters, stops=stop_lists, data=st.data())
def test_what_ends_before_the_minimum_does_not_count(text: str, stops: list[str], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(text)))
    cuts = data.draw(st.lists(st.integers(1, 40)))
    pieces, hit = run(text, stops, cuts, include=False, first=first)
    expected, expected_hit = naive(text, stops, include=False, first=first)
    assert hit == expected_hit
    # Text that was out before the minimum cannot be taken back.
    assert "".join(pieces).startswith(expected)
    assert text.startswith("".join(pieces))
    assert len("".join(pieces)) <= max(len(expected), first)


@given(text=letters, stops=stop_lists)
def test_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    checker, sent = StopChecker(stops), ""
    for end, char in enumerate(text, start=1):
        sent += checker.push(char)
        if checker.is_hit:
            return
        held = text[len(sent) : end]
        could_begin = [held[i:] for i in range(len(held)) if any(s.startswith(held[i:]) for s in stops)]
        assert (held in could_begin) if held else not could_begin


def test_cut_inside_a_piece() -> None:
    checker = StopChecker(["END"])
    assert checker.push("one E") == "one "
    assert checker.push("ND two END") == ""
    assert checker.is_hit
    assert checker.push("three") == ""
    assert checker.flush() == ""


def test_the_longest_of_those_that_end_together() -> None:
    checker = StopChecker(["b", "aab"])
    assert checker.push("xaab") == "x"


@pytest.mark.parametrize(("include", "expected"), [(False, "x"), (True, "xEND")])
def test_include(include: bool, expected: str) -> None:
    checker = StopChecker(["END"], include_in_output=include)
    assert checker.push("xEN") + checker.push("Dy") == expected


def test_many_long_strings() -> None:
    stops = [f"{'a' * 255}{chr(ord('b') + i)}" for i in range(16)]
    checker = StopChecker(stops)
    assert len(checker.push("a" * 1000)) == 1000 - 255
    assert checker.push("q") == ""
    assert checker.is_hit
