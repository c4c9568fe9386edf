"""Requests with every option, beside others whose tokens they must not change."""

from __future__ import annotations

import json

import pytest

from faults.conftest import Case
from support.faults.nothing_lost import CANARIES, CANARY_TOKENS, Recorded
from support.faults.service import all_at_once
from support.triton.burst import bursting
from support.triton.serving import Server

pytestmark = pytest.mark.e2e

# Tensors, and sampling parameters without one.
OPTIONS: list[tuple[dict[str, float], dict[str, object]]] = [
    ({}, {"logit_bias": {"300": 100.0, "301": -100.0}}),
    ({"temperature": 1.5}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 7}),
    ({"repetition_penalty": 1.9}, {"presence_penalty": 2.0, "frequency_penalty": 2.0}),
    ({"temperature": 1.0}, {"n": 4, "seed": 11}),
    ({}, {"logprobs": 5}),
    ({}, {"min_tokens": 20, "stop_token_ids": [300, 301]}),
    ({}, {"stop": ["e"]}),
    ({}, {"bad_words": ["the", "a"]}),
]


def test_options_of_a_request_change_no_other(server: Server, recorded: Recorded, case: Case) -> None:
    """Each enters right behind a request without."""
    with case(), bursting(server) as burst:
        plain = []
        with all_at_once(server, 2 * len(OPTIONS)):
            for prompt, (tensors, parameters) in zip(CANARIES, OPTIONS, strict=True):
                plain.append(burst.send(prompt, CANARY_TOKENS))
                burst.send("A tuple is", 24, **tensors, sampling_parameters=json.dumps(parameters))
        burst.finish()
        assert burst.errors == []
        assert [burst.tokens[one] for one in plain] == [recorded[prompt] for prompt in CANARIES]
