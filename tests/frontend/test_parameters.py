"""Sampling parameters in all spellings; what is wrong is said, never crashed on and never ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.errors import InvalidRequest, TidewheelError, Unsupported
from tidewheel.frontend.absent import ABSENT
from tidewheel.frontend.parameters import _COERCIONS, _KNOWN, ParsedParameters, parse_parameters
from tidewheel.frontend.strict_json import parse_json
from tidewheel.frontend.values import ParameterSource
from tidewheel.request import Priority
from tidewheel.sampling import SamplingParams


def source(origin: str = "sampling_parameters", /, **values: object) -> ParameterSource:
    return ParameterSource(origin=origin, values=values)


def parse(**values: object) -> ParsedParameters:
    return parse_parameters([source(**values)])


def sampling(**values: object) -> SamplingParams:
    return parse(**values).sampling


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_tokens": "128"}, {"max_tokens": 128}),
        ({"max_tokens": 12.0}, {"max_tokens": 12}),
        ({"max_tokens": b" 7 "}, {"max_tokens": 7}),
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"min_length": "2"}, {"min_tokens": 2}),
        ({"random_seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"seed": "18446744073709551615"}, {"seed": 2**64 - 1}),
        ({"temperature": "0.5"}, {"temperature": 0.5}),
        ({"temperature": " +.5e0 "}, {"temperature": 0.5}),
        ({"max_tokens": "1e2"}, {"max_tokens": 100}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"top_k": "0"}, {"top_k": 0}),
        ({"ignore_eos": "true"}, {"ignore_eos": True}),
        ({"ignore_eos": 0}, {"ignore_eos": False}),
        ({"skip_special_tokens": "False"}, {"skip_special_tokens": False}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "", b"\xc3\xa9"]}, {"stop": ("a", "é")}),
        ({"stop_words": [""], "bad_words": ""}, {}),
        ({"stop_words": ["x"]}, {"stop": ("x",)}),
        ({"stop_token_ids": ["3", 4]}, {"stop_token_ids": (3, 4)}),
        ({"stop_token_ids": [3], "end_id": 3}, {"stop_token_ids": (3,)}),
        ({"stop_token_ids": [3], "end_id": "2"}, {"stop_token_ids": (3, 2)}),
        ({"logit_bias": {"5": "1.5", "6": -1}}, {"logit_bias": {5: 1.5, 6: -1.0}}),
        ({"logprobs": 3}, {"logprobs": 3}),
        ({"pad_id": 0, "max_tokens": None}, {}),
        ({"n": 1, "best_of": 1, "beam_width": 1, "length_penalty": 1.0, "guided_json": None, "tools": []}, {}),
        ({"response_format": {"type": "text"}, "detokenize": True, "n": "1"}, {}),
    ],
    ids=str,
)
def test_spellings(given: dict[str, object], expected: dict[str, Any]) -> None:
    assert sampling(**given) == SamplingParams(**expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": True}, ["max_tokens", "True", "integer"]),
        ({"max_tokens": 1.5}, ["max_tokens", "1.5", "integer"]),
        ({"max_tokens": "many"}, ["max_tokens", "many"]),
        ({"max_tokens": {"a": 1}}, ["max_tokens", "integer"]),
        ({"max_tokens": 10**6000}, ["max_tokens", "bits", "range"]),
        ({"max_tokens": float("inf")}, ["max_tokens", "inf"]),
        ({"max_tokens": "1_000"}, ["max_tokens", "1_000", "number"]),
        ({"temperature": "\u0660.\u0665"}, ["temperature", "number"]),
        ({"temperature": ""}, ["temperature", "number"]),
        ({"max_tokens": "1" * 300}, ["max_tokens", "range"]),
        ({"temperature": 10**400}, ["temperature", "range"]),
        ({"temperature": float("nan")}, ["temperature", "nan", "finite"]),
        ({"temperature": "nan"}, ["temperature", "nan", "finite"]),
        ({"temperature": [1]}, ["temperature", "[1]", "number"]),
        ({"ignore_eos": "maybe"}, ["ignore_eos", "maybe", "true or false"]),
        ({"ignore_eos": 2}, ["ignore_eos", "2"]),
        ({"stop": [["a"]]}, ["stop", "['a']", "text"]),
        ({"stop": "\ud800"}, ["stop", "Unicode"]),
        ({"stop": b"\xff"}, ["stop", "UTF-8", "byte 0"]),
        ({"stop": ["x"] * 17}, ["stop", "17", "16"]),
        ({"stop": "x" * 257}, ["stop", "257", "256"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids", "-1"]),
        ({"end_id": -1}, ["stop_token_ids", "-1"]),
        ({"logit_bias": [1]}, ["logit_bias", "object"]),
        ({"logit_bias": {"x": 1}}, ["logit_bias", "x"]),
        ({"logit_bias": {"1": 1, "01": 1}}, ["logit_bias", "1", "twice"]),
        ({"logprobs": 10**9}, ["logprobs", "1000000000", "20"]),
        ({"priority": 5}, ["priority", "5", "4"]),
        ({"cache_salt": 3}, ["cache_salt", "3", "text"]),
        ({"cache_salt": "x" * 300}, ["cache_salt", "300", "256"]),
        ({"temprature": 1}, ["temprature", "temperature"]),
        ({"qqqqqq": 1}, ["qqqqqq", "max_tokens"]),
        ({"k" * 10**6: 1}, ["unknown"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, list) else "",
)
def test_mistakes_are_named(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling(**given)
    assert len(str(caught.value)) < 600
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"n": 2}, {"best_of": 3}, {"beam_width": 4}, {"prompt_logprobs": 1}, {"prompt_logprobs": 0},
        {"guided_json": {}}, {"structured_outputs": {"regex": "a"}}, {"response_format": {"type": "json_object"}},
        {"logits_processors": ["x"]}, {"truncate_prompt_tokens": 3}, {"lora_name": "x"}, {"deadline_ms": 5},
        {"session_id": "x"}, {"session_ttl_s": 3}, {"tenant": "x"}, {"length_penalty": 2.0},
        {"allowed_token_ids": [1]}, {"detokenize": False}, {"do_sample": False}, {"chat_template": "x"}, {"n": True},
    ],
    ids=str,
)  # fmt: skip
def test_known_and_absent_is_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match=rf"\[TW-UNSUPPORTED\] {next(iter(given))} is "):
        sampling(**given)


def test_carriers_that_agree() -> None:
    tensors = source("input tensor", max_new_tokens=5, stop_words=[""])
    parsed = parse_parameters(
        [source(max_tokens="5", stop="x"), source("request parameter", max_tokens=5.0), tensors]
    )
    assert parsed.sampling == SamplingParams(max_tokens=5, stop=("x",))


def test_carriers_that_disagree_are_both_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_parameters([source(max_tokens=4), source("input tensor", max_new_tokens=5)])
    assert str(caught.value) == (
        "[TW-INPUT] max_tokens in sampling_parameters is 4 and max_new_tokens in input tensor is 5: give one value"
    )


def test_priority_and_salt() -> None:
    assert parse().priority is Priority.NORMAL
    assert parse(priority=0).priority is Priority.NORMAL
    assert parse(priority="1", cache_salt="é") == (SamplingParams(), Priority.CRITICAL, "é")


def test_defaults_of_the_model_give_way() -> None:
    defaults = {"temperature": 0.7, "top_k": 50}
    assert parse_parameters([], defaults).sampling == SamplingParams(temperature=0.7, top_k=50)
    assert parse_parameters([source(temperature=0)], defaults).sampling == SamplingParams(temperature=0, top_k=50)


def test_no_name_is_both_offered_and_absent() -> None:
    assert len(set(_KNOWN)) == len(_KNOWN)
    assert not set(_COERCIONS) & set(ABSENT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', ["'a'", "twice"]),
        ('[{"b": [{"c": 1, "d": 2, "c": 1}]}]', ["'c'", "twice"]),
        ('{"a": ', ["not JSON", "character 6"]),
        ("[" * 100_000, ["nested too deep"]),
        ("1" * 10_000, ["integer"]),
        (b'{"a": "\xff"}', ["UTF-8", "byte 7"]),
        ("", ["not JSON"]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_json_that_is_refused(text: str | bytes, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_json(text, "sampling_parameters")
    for word in ["sampling_parameters", *words]:
        assert word in str(caught.value)


def test_a_megabyte_of_json() -> None:
    text = json.dumps({"logit_bias": {str(i): 1 for i in range(100_000)}})
    values = parse_json(text, "sampling_parameters")
    assert isinstance(values, dict)
    with pytest.raises(InvalidRequest, match="logit_bias has 100000 entries"):
        sampling(**values)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8)
    | st.sampled_from(["", "1", "-1", "1e400", "inf", "\ud800", 10**30, 2**64, 1e308]),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=4),
    max_leaves=8,
)  # fmt: skip


@given(values=st.dictionaries(st.sampled_from(_KNOWN) | st.text(max_size=12), json_values, max_size=4))
def test_any_value_parses_or_is_refused(values: dict[str, object]) -> None:
    try:
        parsed = parse_parameters([source(**values)])
    except TidewheelError as error:
        assert str(error).startswith(("[TW-INPUT] ", "[TW-UNSUPPORTED] "))
    else:
        assert isinstance(parsed.sampling, SamplingParams)


@given(value=st.floats())
def test_any_temperature_runs_or_is_refused(value: float) -> None:
    try:
        assert sampling(temperature=value).temperature == value
    except InvalidRequest:
        assert not (value == 0 or 0.01 <= value <= 100)
