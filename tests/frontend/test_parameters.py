"""Sampling parameters in all spellings; what is wrong is said, never crashed on and never ignored."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.errors import InvalidRequest, TidewheelError, Unsupported
from tidewheel.frontend import request_parameters
from tidewheel.frontend.coercion import ParameterSource, parse_json
from tidewheel.frontend.request_parameters import ABSENT, COERCIONS, SUGGESTED, ParsedParameters, parse_parameters
from tidewheel.request import Priority, RequestObjective
from tidewheel.request_options import MAX_DEADLINE_MS, RequestOptions
from tidewheel.sampling import SamplingParams

KNOWN = (*SUGGESTED, *ABSENT)


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
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"min_length": "2"}, {"min_tokens": 2}),
        ({"seed": -1}, {}),
        ({"seed": "-1", "random_seed": -1}, {}),
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
        ({"stop_words": ["a", "", b"\xc3\xa9"]}, {"stop": ("a", "é")}),
        ({"stop_words": [""], "bad_words": ""}, {}),
        ({"stop_words": ["x"]}, {"stop": ("x",)}),
        ({"stop_token_ids": ["3", 4]}, {"stop_token_ids": (3, 4)}),
        ({"stop_token_ids": [3], "end_id": 3}, {"stop_token_ids": (3,)}),
        ({"stop_token_ids": [3], "end_id": "2"}, {"stop_token_ids": (3, 2)}),
        (
            {"allowed_token_ids": ["5", 6], "truncate_prompt_tokens": "-1"},
            {"allowed_token_ids": (5, 6), "truncate_prompt_tokens": -1},
        ),
        ({"logit_bias": {"5": "1.5", "6": -1}}, {"logit_bias": {5: 1.5, 6: -1.0}}),
        ({"logprobs": 3}, {"logprobs": 3}),
        ({"pad_id": 0, "max_tokens": None}, {}),
        ({"n": 1, "best_of": 1, "beam_width": 1, "length_penalty": 1.0, "guided_json": None, "tools": []}, {}),
        ({"response_format": {"type": "text"}, "detokenize": True, "n": "1"}, {}),
        ({"metadata": {}, "service_tier": "auto", "modalities": ["text"]}, {}),
        ({"echo": False, "user": "", "model": None, "tool_choice": "none", "store": False, "top_logprobs": 0}, {}),
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
        ({"stop": ["a", ""]}, ["stop", "empty string"]),
        ({"stop": ""}, ["stop", "empty string"]),
        ({"stop": "\ud800"}, ["stop", "Unicode"]),
        ({"stop": b"\xff"}, ["stop", "UTF-8", "byte 0"]),
        ({"stop": ["x"] * 17}, ["stop", "17", "16"]),
        ({"stop": ["y", "x" * 257]}, ["an entry of stop has 257 bytes", "256"]),
        ({"top_p": 1 + 2**-52}, ["top_p is 1.0000000000000002: it must be above 0 and at most 1"]),
        ({"temperature": 0.01 - 2**-58}, ["temperature is 0.009999999999999997: it must be 0 or 0.01 to 100"]),
        ({"presence_penalty": -3.0}, ["presence_penalty is -3: it must be -2 to 2"]),
        ({"stop_token_ids": [-1]}, ["stop_token_ids", "-1"]),
        ({"end_id": -1}, ["stop_token_ids", "-1"]),
        ({"logit_bias": [1]}, ["logit_bias", "object"]),
        ({"allowed_token_ids": []}, ["allowed_token_ids", "allows no token"]),
        ({"logit_bias": {"x": 1}}, ["logit_bias", "x"]),
        ({"logit_bias": {"1": 1, "01": 1}}, ["logit_bias", "1", "twice"]),
        ({"logprobs": -1}, ["logprobs", "-1", "0 to"]),
        ({"priority": 5}, ["priority", "5", "4"]),
        ({"priority": "urgent"}, ["priority", "urgent", "critical, high, normal or low"]),
        ({"priority": "x" * 999}, ["priority", "x" * 80, "critical, high, normal or low"]),
        ({"seed": -2}, ["seed is -2"]),
        ({"seed": 2.0**63 + 2048}, ["seed arrived as the float 9.22337e+18", "send it as text"]),
        ({"cache_salt": 3}, ["cache_salt", "3", "text"]),
        ({"cache_salt": "x" * 300}, ["cache_salt", "300", "256"]),
        ({"temprature": 1}, ["temprature", "temperature"]),
        ({"gided_json": "x"}, ["gided_json", "did you mean 'guided_json'"]),
        ({"max_num_seqs": 4}, ["max_num_seqs", "setting of the entry"]),
        ({"qqqqqq": 1}, ["qqqqqq", "max_tokens"]),
        ({"k" * 10**6: 1}, ["unknown"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, list) else "",
)
def test_mistakes_are_named(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling(**given)
    assert len(str(caught.value)) < 800
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"best_of": 3}, {"beam_width": 4},
        {"logits_processors": ["x"]}, {"lora_task_id": 7}, {"length_penalty": 2.0},
        {"detokenize": False}, {"do_sample": False}, {"chat_template": "x"},
        {"timeout": 5}, {"user": "u"}, {"model": "m"}, {"image": "x"}, {"stream_options": {"a": 1}},
        {"top_logprobs": 3}, {"functions": [{}]}, {"service_tier": "flex"}, {"embedding_request": "{}"},
        {"web_search_options": {"a": 1}}, {"prompt_cache_retention": "24h"},
    ],
    ids=str,
)  # fmt: skip
def test_known_and_absent_is_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(Unsupported, match=rf"\[TW-UNSUPPORTED\] {next(iter(given))} is "):
        sampling(**given)


def test_a_setting_says_what_a_request_sets() -> None:
    with pytest.raises(Unsupported, match="a setting of the entry; a request sets deadline_ms"):
        sampling(max_request_s=5)


def test_infinity_of_a_tensor_names_its_type() -> None:
    with pytest.raises(InvalidRequest, match=r"temperature is inf: it must be finite; .* FP32, .* 3.4e\+38"):
        parse_parameters([source("input tensor", temperature=float("inf"))])


def test_a_long_time_is_a_plain_number() -> None:
    with pytest.raises(InvalidRequest, match="session_ttl_s is 100000000, and session_id is not set"):
        sampling(session_ttl_s=1e8)


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
    assert parse().options.priority is Priority.NORMAL
    assert parse(priority=0).options.priority is Priority.NORMAL
    expected = RequestOptions(priority=Priority.CRITICAL, cache_salt="é")
    assert parse(priority="1", cache_salt="é") == ParsedParameters(SamplingParams(), expected)
    for name in ("critical", "CRITICAL", " Critical "):
        assert parse(priority=name, cache_salt="é") == ParsedParameters(SamplingParams(), expected)
    assert parse(qos_class="low").options.priority is RequestOptions(priority="low").priority is Priority.LOW  # type: ignore[arg-type]


def test_defaults_of_the_model_give_way() -> None:
    defaults = {"temperature": 0.7, "top_k": 50}
    assert parse_parameters([], defaults).sampling == SamplingParams(temperature=0.7, top_k=50)
    assert parse_parameters([source(temperature=0)], defaults).sampling == SamplingParams(temperature=0, top_k=50)


def test_no_name_is_both_offered_and_absent() -> None:
    assert len(set(KNOWN)) == len(KNOWN)
    assert not set(COERCIONS) & set(ABSENT)
    groups = tomllib.loads(Path(request_parameters.__file__).with_name("absent_parameters.toml").read_text())[
        "absent"
    ]
    assert sum(len(group["names"]) for group in groups) == len(ABSENT)  # none has two reasons


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


@given(values=st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=12), json_values, max_size=4))
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


# --- how it is served ---------------------------------------------------------------------------------------------


def options(**values: object) -> RequestOptions:
    return parse(**values).options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"n": "3"}, {"n": 3}),
        ({"num_return_sequences": 2, "best_of": "2"}, {"n": 2}),
        ({"tenant": b"acme", "session_id": "s", "session_ttl_s": "2.5"},
         {"tenant": "acme", "session_id": "s", "session_ttl_s": 2.5}),
        ({"deadline_ms": "1500", "soft_deadline_ms": 200}, {"deadline_ms": 1500.0, "soft_deadline_ms": 200.0}),
        ({"ttft_ms": "500", "tpot_ms": 20, "objective_action": "refuse"},
         {"ttft_ms": 500.0, "tpot_ms": 20.0, "objective_action": "refuse"}),
        ({"close_session": "true", "session_id": "s", "tenant": "t"},
         {"close_session": True, "session_id": "s", "tenant": "t"}),
        ({"close_session": False, "max_tokens": 3}, {}),
        ({"pause_session": ["search", "read"], "session_id": "s"},
         {"pause_session": ("search", "read"), "session_id": "s"}),
        ({"pause_session": [], "max_tokens": 3}, {}),
        ({"lora_name": "sql", "tenant": "t"}, {"lora_name": "sql", "tenant": "t"}),
        ({"lora_order": "load", "lora_name": "sql", "lora_path": "a/b", "tenant": "t"},
         {"lora_order": "load", "lora_name": "sql", "lora_path": "a/b", "tenant": "t"}),
        ({"lora_order": "unload", "lora_name": b"sql"}, {"lora_order": "unload", "lora_name": "sql"}),
        ({"lora_order": "list"}, {"lora_order": "list"}),
        ({"tenant": "", "session_id": "", "deadline_ms": None}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_options(given: dict[str, object], expected: dict[str, Any]) -> None:
    assert options(**given) == RequestOptions(**expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n": 0}, ["n is 0", "1 to 16"]),
        ({"n": -1}, ["n is -1"]),
        ({"n": 10**9}, ["n is 1000000000", "16"]),
        ({"n": True}, ["n is True", "integer"]),
        ({"n": 2, "num_return_sequences": 3}, ["n in", "num_return_sequences in"]),
        ({"tenant": "x" * 129}, ["tenant has 129 characters", "128"]),
        ({"tenant": 5}, ["tenant", "text"]),
        ({"tenant": "acme\0"}, ["tenant holds the control character U+0000 at position 4"]),
        ({"session_id": "a\x9b"}, ["session_id holds the control character U+009B at position 1"]),
        ({"session_id": "é" * 129}, ["session_id has 258 bytes", "256"]),
        ({"deadline_ms": 0}, ["deadline_ms is 0", "above 0"]),
        ({"deadline_ms": -5}, ["deadline_ms is -5", "above 0"]),
        ({"deadline_ms": float("nan")}, ["deadline_ms is nan"]),
        ({"deadline_ms": "inf"}, ["deadline_ms is inf"]),
        ({"deadline_ms": "soon"}, ["deadline_ms", "soon", "number"]),
        ({"soft_deadline_ms": 0}, ["soft_deadline_ms is 0"]),
        ({"ttft_ms": -5}, ["ttft_ms is -5", "above 0 and at most 600000"]),
        ({"ttft_ms": 600_001}, ["ttft_ms is 600001", "at most 600000"]),
        ({"tpot_ms": "fast"}, ["tpot_ms", "fast", "number"]),
        ({"tpot_ms": 60_001}, ["tpot_ms is 60001", "at most 60000"]),
        ({"tpot_ms": float("nan")}, ["tpot_ms is nan"]),
        ({"ttft_ms": 5, "objective_action": "hope"}, ["objective_action is 'hope'", "demote or refuse"]),
        ({"objective_action": "refuse"}, ["objective_action is refuse", "ttft_ms", "tpot_ms"]),
        ({"soft_deadline_ms": 10, "deadline_ms": 10}, ["soft_deadline_ms is 10", "deadline_ms 10", "first"]),
        ({"session_ttl_s": 5}, ["session_ttl_s is 5", "session_id"]),
        ({"session_id": "s", "session_ttl_s": 0}, ["session_ttl_s is 0", "above 0"]),
        ({"session_id": "s", "n": 2}, ["n is 2", "session_id"]),
        ({"close_session": True}, ["close_session", "session_id"]),
        ({"close_session": True, "session_id": "s", "max_tokens": 4}, ["close_session", "max_tokens"]),
        ({"close_session": True, "session_id": "s", "priority": 1}, ["close_session", "priority"]),
        ({"close_session": "perhaps"}, ["close_session", "perhaps"]),
        ({"pause_session": ["search"]}, ["pause_session", "session_id"]),
        ({"pause_session": ["search"], "session_id": "s", "max_tokens": 4}, ["pause_session", "max_tokens"]),
        ({"pause_session": ["search"], "session_id": "s", "close_session": True}, ["close_session", "pause_session"]),
        ({"pause_session": ["search", 5], "session_id": "s"}, ["pause_session", "text"]),
        ({"pause_session": ["a"] * 65, "session_id": "s"}, ["pause_session has 65 entries", "64"]),
        ({"pause_session": ["a" * 257], "session_id": "s"}, ["pause_session has 257 bytes", "256"]),
        ({"pause_session": ["a\0"], "session_id": "s"}, ["pause_session holds", "U+0000"]),
        ({"lora_name": "x" * 129}, ["lora_name has 129 characters", "128"]),
        ({"lora_name": "a\n"}, ["lora_name holds the control character U+000A"]),
        ({"lora_order": "reload", "lora_name": "a"}, ["lora_order is 'reload'", "load or unload or list"]),
        (
            {"lora_order": "load", "lora_name": "a"},
            ["lora_order is 'load', with lora_name: load goes"],
        ),
        ({"lora_order": "load", "lora_path": "a"}, ["lora_order is 'load', with lora_path"]),
        ({"lora_order": "unload"}, ["lora_order is 'unload', with no adapter", "unload with lora_name"]),
        ({"lora_order": "list", "lora_name": "a"}, ["lora_order is 'list', with lora_name", "list with none"]),
        ({"lora_order": "unload", "lora_name": "a", "lora_path": "b"}, ["lora_path: load goes with"]),
        ({"lora_path": "b"}, ["lora_path: load goes with"]),
        ({"lora_order": "list", "max_tokens": 4}, ["lora_order is set", "tenant, not with max_tokens"]),
        ({"lora_order": "list", "pause_session": ["a"], "session_id": "s"}, ["pause_session", "not with lora_order"]),
        ({"lora_order": "load", "lora_name": "a", "lora_path": "b" * 4097}, ["lora_path has 4097 bytes", "4096"]),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_options_that_are_refused(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        options(**given)
    for word in words:
        assert word in str(caught.value)


def test_all_sequences_are_returned() -> None:
    with pytest.raises(Unsupported, match="best_of is 3 and n is 2"):
        options(n=2, best_of=3)


def test_moments_count_from_the_arrival() -> None:
    given = options(deadline_ms=1500, soft_deadline_ms=0.5)
    assert given.deadline_ns(7_000_000_000) == 8_500_000_000
    assert given.soft_deadline_ns(7_000_000_000) == 7_000_500_000
    assert options(ttft_ms=500).objective == RequestObjective(0.5)
    assert options(tpot_ms=20, objective_action="refuse").objective == RequestObjective(math.inf, 0.02, True)
    assert options().objective is None
    assert options().deadline_ns(7) == options().soft_deadline_ns(7) == 0


def test_ten_years_count_as_thirty_days() -> None:
    thirty_days = 5 + int(MAX_DEADLINE_MS * 1e6)
    assert options(deadline_ms=10 * 365 * 86_400_000).deadline_ns(5) == thirty_days
    assert options().deadline_ns(5, timeout_us=2**64 - 1) == thirty_days


@pytest.mark.parametrize(("deadline_ms", "timeout_us"), [(3, 9000), (9, 3000), (None, 3000), (3, 0)])
def test_the_earlier_of_deadline_and_timeout(deadline_ms: int | None, timeout_us: int) -> None:
    assert options(deadline_ms=deadline_ms).deadline_ns(1, timeout_us) == 3_000_001
