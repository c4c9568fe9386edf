from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.errors import InvalidRequest
from tidewheel.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    LogitBias,
    SamplingParams,
)

BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("max_tokens", 2**63 - 1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -1.0),
    ("temperature", 1e-38),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_p", 0.0),
    ("top_p", 1.0001),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("seed", -1),
    ("seed", 2**64),
    ("logprobs", -1),
    ("logprobs", 10**12),
    ("stop", ("x",) * 17),
    ("stop", ("x" * 257,)),
    ("stop", ("",)),
    ("bad_words", (3,)),
    ("stop_token_ids", (-1,)),
    ("allowed_token_ids", (-1,)),
    ("allowed_token_ids", tuple(range(MAX_ALLOWED_TOKEN_IDS + 1))),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("grammar", {"type": "object"}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda v: repr(v)[:30])
def test_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**{field: value})
    assert field in error.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0), ("temperature", 0.01), ("top_k", -1), ("top_p", 1), ("seed", MAX_SEED), ("logprobs", 0)],
)
def test_limits_are_inclusive(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_min_tokens_within_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 5, more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@given(st.sampled_from(["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"]), st.floats())
def test_any_float_is_taken_or_refused(field: str, value: float) -> None:
    try:
        params = SamplingParams(**{field: value})  # type: ignore[arg-type]
    except InvalidRequest as error:
        assert field in error.message
    else:
        assert math.isfinite(getattr(params, field))


def test_biases_of_a_message_are_arrays_with_ascending_ids() -> None:
    bias = LogitBias.of({9: -2.5, 3: 1.0})
    assert [column.tolist() for column in LogitBias.from_bytes(*bias.to_bytes())] == [[3, 9], [1.0, -2.5]]
    assert LogitBias.of({}).to_bytes() == (b"", b"")
