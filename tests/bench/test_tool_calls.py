"""Calls that a random model makes under the grammars of tools: the benchmark's cases, with few seeds."""

from __future__ import annotations

import pytest

from engine.tool_calls import Case, cases, run


@pytest.mark.parametrize("case", cases(), ids="-".join)
def test_answers_that_were_not_cut_follow_the_schemas(case: Case) -> None:
    tally = run(case, range(3))
    assert tally.invalid == 0
    assert tally.begun_early == tally.several_tokens
    assert tally.calls or tally.cut or case.choice == "auto"
