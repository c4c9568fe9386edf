"""A covering array tries every pair of values in fewer cases than the full product."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from support.kernels.covering import covering, pairs


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_every_pair_of_the_cases_is_tried(sizes: list[int], data: st.DataObject) -> None:
    product = [dict(zip("abcd", values, strict=False)) for values in itertools.product(*map(range, sizes))]
    cases = data.draw(st.lists(st.sampled_from(product), min_size=1, unique_by=lambda case: tuple(case.items())))
    chosen = covering(cases)
    assert set().union(*(pairs(cases[index]) for index in chosen)) == set().union(*map(pairs, cases))
    assert len(set(chosen)) == len(chosen)


def test_a_product_of_four_parameters_needs_few_cases() -> None:
    product = [dict(zip("abcd", values, strict=True)) for values in itertools.product(range(4), repeat=4)]
    assert 16 <= len(covering(product)) <= 28  # of 256


def test_two_parameters_need_their_product() -> None:
    assert len(covering([{"a": a, "b": b} for a in range(3) for b in range(5)])) == 15
