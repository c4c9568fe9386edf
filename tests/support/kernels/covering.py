"""Covering arrays: the fewest cases, nearly, in which every two values of two parameters meet.

Most defects need one value or two together (Kuhn, Wallace, Gallo, "Software Fault Interactions", IEEE TSE 2004).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Case = Mapping[str, int]  # the index of each parameter's value


def pairs(case: Case) -> set[tuple[tuple[str, int], ...]]:
    """Return the pairs of values that a case tries; with one parameter, its value."""
    return set(itertools.combinations(sorted(case.items()), min(2, len(case))))


def covering(cases: Sequence[Case]) -> list[int]:
    """Return indices of cases that together try every pair of values that `cases` try, chosen greedily."""
    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs(cases[index]) & missing))
        chosen.append(best)
        missing -= pairs(cases[best])
    return sorted(chosen)
