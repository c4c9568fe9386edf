"""Penalties and forbidden words against a plain computation on the host, through scheduler, engine loop and runner.

The model looks its logits up by the last token, so that they are the same bits however the work is cut into steps.
Logits and penalties are multiples of 2⁻¹⁰, and factors powers of two: every result is exact on any processor.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from support.long_runs import examples
from support.runner.look_up_engine import BLOCK_SIZE, CONTEXT, HIDDEN, LOGITS, VOCABULARY, Engine
from support.runner.step_loop import request
from tidewheel.request import FinishReason, Request
from tidewheel.sampling import SamplingParams, TopLogprobs
from tidewheel.scheduler import controllers


def by_definition(subject: Request) -> list[int]:
    """Its greedy tokens, with rules that look at all of them, one after the other."""
    sampling, prompt = subject.sampling, subject.prompt_token_ids.tolist()
    tokens = list(prompt)
    while len(tokens) < len(prompt) + subject.max_tokens:
        logits, output = LOGITS[tokens[-1]].numpy().copy(), Counter(tokens[len(prompt) :])
        if sampling.allowed_token_ids:
            logits[[token for token in range(VOCABULARY) if token not in sampling.allowed_token_ids]] = -np.inf
        for token, value in sampling.logit_bias.items():
            logits[token] += np.float32(value)
        if output.total() < sampling.min_tokens:
            logits[list(subject.stop_token_ids)] = -np.inf
        for word in subject.bad_words_ids:
            if tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]:
                logits[word[-1]] = -np.inf
        for token in set(tokens):
            factor = np.float32(sampling.repetition_penalty)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
            logits[token] -= np.float32(sampling.frequency_penalty) * np.float32(output[token])
            logits[token] -= np.float32(sampling.presence_penalty) * np.float32(output[token] > 0)
        tokens.append(int(logits.argmax()))
        if tokens[-1] in subject.stop_token_ids:
            break
    return tokens[len(prompt) :]


TOKEN = st.integers(0, VOCABULARY - 1)
PENALTY = st.sampled_from([0.0, 0.0, -1.5, 0.75, 2.0])


@st.composite
def any_request(draw: st.DrawFn, name: str) -> Request:
    prompt = np.array(draw(st.lists(TOKEN, min_size=1, max_size=16)), dtype=np.int32)
    sampling = SamplingParams(
        temperature=0.0,
        min_tokens=draw(st.sampled_from([0, 0, 5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 2.0])),
        presence_penalty=draw(PENALTY),
        frequency_penalty=draw(PENALTY),
        logit_bias=draw(st.dictionaries(TOKEN, st.sampled_from([-4.0, 3.5]), max_size=2)),
        # So many that stop tokens and forbidden words leave one.
        prompt_logprobs=draw(st.sampled_from([None, 0, 2])),
        allowed_token_ids=tuple(draw(st.just(frozenset()) | st.sets(TOKEN, min_size=8))),
    )
    words = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), max_size=4)
    stops = draw(st.sets(TOKEN, max_size=2))
    rules: dict[str, Any] = {"stop_token_ids": tuple(stops), "bad_words_ids": tuple(draw(words))}
    pooling = draw(st.sampled_from(["", "", "", "last", "mean"]))
    if pooling:
        return request(name, prompt, 1, replace(sampling, min_tokens=0), pooling=pooling, **rules)
    count = draw(st.integers(sampling.min_tokens or 1, CONTEXT - len(prompt)))
    return request(name, prompt, count, sampling, **rules)


@st.composite
def any_requests(draw: st.DrawFn) -> list[Request]:
    return [draw(any_request(f"r{i}")) for i in range(draw(st.integers(1, 8)))]


ENGINES = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 4),
        "num_blocks": st.integers(CONTEXT // BLOCK_SIZE, 24),
        "token_budget": st.integers(4, 24),
        "max_inflight_steps": st.sampled_from([1, 2]),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "is_staged": st.booleans(),
        "right_drafts": st.sampled_from([None, 0.2, 0.9]),
    }
)


def prompt_logprobs_by_definition(subject: Request) -> list[TopLogprobs]:
    num_top, prompt = subject.sampling.prompt_logprobs, subject.prompt_token_ids.tolist()
    entries = []
    for before, token in pairwise(prompt) if num_top is not None else ():
        logprobs = LOGITS[before].log_softmax(0)
        top = logprobs.topk(num_top or 0)
        rank = int((LOGITS[before] >= LOGITS[before, token]).sum())
        entries.append(
            TopLogprobs(float(logprobs[token]), rank, tuple(top.indices.tolist()), tuple(top.values.tolist()))
        )
    return entries


def check_prompt_logprobs(subject: Request) -> None:
    """Those of a prompt are whole as soon as there is output, whatever was cached, cut or computed again."""
    expected = prompt_logprobs_by_definition(subject)
    found = subject.prompt_logprobs
    assert len(found) == len(expected) or not subject.output_token_ids
    for one, other in zip(found, expected, strict=False):
        assert (one.rank, one.top_ids) == (other.rank, other.top_ids)
        assert (one.logprob, *one.top_logprobs) == pytest.approx((other.logprob, *other.top_logprobs), abs=1e-4)


@settings(max_examples=examples(30, 150), deadline=None)
@given(
    requests=any_requests(),
    engine=ENGINES,
    fails_at=st.sets(st.integers(1, 40), max_size=2),
    min_scores=st.integers(1, 20),
)
def test_tokens_are_those_of_the_definition(
    requests: list[Request], engine: dict[str, Any], fails_at: set[int], min_scores: int
) -> None:
    """Rows are shared out anew, preempted and come back, and a step may run out of memory and be run again."""
    with mock.patch.object(controllers, "SPARE_LOGITS", min_scores):
        Engine(fails_at=tuple(fails_at), **engine).run(requests)
    for item in requests:
        check_prompt_logprobs(item)
        if item.pooling and item.output_token_ids:
            assert item.pooled is not None
            states = HIDDEN[torch.from_numpy(item.prompt_token_ids).long()]
            assert item.pooled.tolist() == (states[-1] if item.pooling == "last" else states.sum(0)).tolist()
        expected = by_definition(item)
        assert item.output_token_ids == expected[: len(item.output_token_ids)]
        assert item.finish_reason is FinishReason.ERROR or len(item.output_token_ids) == len(expected)
    num_failed = sum(item.finish_reason is FinishReason.ERROR for item in requests)
    assert num_failed <= len(fails_at)


def penalised(count: int) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.375)
    words = ((1, 2), (3, 4, 5), (6,))
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (count, 6), dtype=np.int32)
    return [request(f"r{i}", prompt, 30, sampling, bad_words_ids=words) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_preempted_rows_come_back_with_their_counts(steps_in_flight: int, mode: str) -> None:
    requests = penalised(6)
    engine = Engine(
        max_num_seqs=3, num_blocks=12, token_budget=16, max_inflight_steps=steps_in_flight,
        preemption_mode=mode,
    )  # fmt: skip
    engine.run(requests)
    assert engine.scheduler.stats().num_preemptions > 0
    assert [item.output_token_ids for item in requests] == [by_definition(item) for item in requests]


def test_rules_decide_in_these_cases() -> None:
    """Without the rules the tokens would differ, so the comparisons above can fail."""
    for item in penalised(6):
        plain = request("plain", item.prompt_token_ids, 30)
        worded = request("worded", item.prompt_token_ids, 30, bad_words_ids=item.bad_words_ids)
        assert len({tuple(by_definition(other)) for other in (item, plain, worded)}) == 3


def test_a_word_reaches_back_to_the_first_token_and_no_further() -> None:
    """The tokens before a row belong to another one; here they are still zeros."""
    prompt = np.array([1, 2], dtype=np.int32)
    best = by_definition(request("plain", prompt, 1))[0]
    fitting = request("fitting", prompt, 1, bad_words_ids=((1, 2, best),))
    longer = request("longer", prompt, 1, bad_words_ids=((0, 1, 2, best), (0, 0, 1, 2, best)))
    Engine(max_num_seqs=3, num_blocks=12).run([request("first", prompt, 1), fitting, longer])
    assert fitting.output_token_ids == by_definition(fitting) != [best]
    assert longer.output_token_ids == [best]
