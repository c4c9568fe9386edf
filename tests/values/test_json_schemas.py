from __future__ import annotations

from typing import Any

import pytest

from tidewheel.errors import Unsupported
from tidewheel.grammar import MOST_BOUND, Grammar, check_bounds
from tidewheel.runner.grammar_compiler import to_source

BIG = 10**25 + 3


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"maximum": BIG}, f"schema: maximum is {BIG}: bounds beyond {MOST_BOUND} are not supported"),
        ({"properties": {"a": {"minimum": -MOST_BOUND - 1}}}, f"minimum is -{MOST_BOUND + 1}: bounds beyond"),
        ({"exclusiveMinimum": MOST_BOUND}, f"exclusiveMinimum is {MOST_BOUND}: bounds beyond {MOST_BOUND - 1}"),
        ({"exclusiveMaximum": -MOST_BOUND}, "exclusiveMaximum is"),
        ({"properties": {"enum": {"maximum": BIG}}}, "maximum is"),
        ({"$defs": {"default": {"items": [{"multipleOf": BIG}]}}}, "multipleOf is"),
        ({"anyOf": [{}, {"maximum": 1e300}]}, "maximum is 1e+300: bounds"),
        ({"maximum": float("inf")}, "maximum is"),
    ],
    ids=str,
)
def test_bounds_that_floats_do_not_hold_are_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported) as caught:
        to_source(Grammar.json_schema(schema, "schema"))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"minimum": -MOST_BOUND, "maximum": MOST_BOUND, "multipleOf": 0.1, "exclusiveMinimum": 1 - MOST_BOUND},
        {"enum": [{"maximum": BIG}], "const": {"maximum": BIG}, "default": {"maximum": BIG}},
        {"properties": {"maximum": {"examples": [{"maximum": BIG}], "const": BIG}}},
        {"minLength": BIG, "maximum": True, "minimum": "x"},
        False,
    ],
    ids=str,
)
def test_other_schemas_pass(schema: object) -> None:
    check_bounds("schema", schema)
