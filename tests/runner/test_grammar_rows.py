"""Rows with grammars against a search through all texts of the grammar, through scheduler, engine loop and runner."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from support.long_runs import examples
from support.runner.look_up_engine import BLOCK_SIZE, CONTEXT, LOGITS, VOCABULARY, Engine
from support.runner.step_loop import request
from tidewheel.grammar import Grammar, RowGrammar, TokenGrammar
from tidewheel.request import FinishReason, Request
from tidewheel.runner.grammar_compiler import GrammarCompiler, to_source
from tidewheel.sampling import SamplingParams

LETTERS = "abcdefghijklmno"  # token ids 0 to 14
ENDS = (15, 16)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    folder: Path = tmp_path_factory.mktemp("letters")
    backend.save(str(folder / "tokenizer.json"))
    return GrammarCompiler(folder, VOCABULARY)


def text_of(token_ids: list[int]) -> str:
    return "".join(LETTERS[token_id] for token_id in token_ids)


def by_definition(subject: Request, texts: set[str]) -> list[int]:
    """Its greedy tokens."""
    sampling, last = subject.sampling, int(subject.prompt_token_ids[-1])
    output: list[int] = []
    while len(output) < subject.max_tokens:
        allowed = {i for i, c in enumerate(LETTERS) if any(t.startswith(text_of(output) + c) for t in texts)}
        allowed |= set(ENDS if text_of(output) in texts else ())
        avoided = {*ENDS, *subject.stop_token_ids} if len(output) < sampling.min_tokens else set[int]()
        avoided |= set(ENDS if sampling.ignore_eos else ())
        logits = LOGITS[last].numpy().copy()
        for token, value in sampling.logit_bias.items():
            logits[token] += np.float32(value)
        choices = sorted(allowed - avoided or allowed)
        last = choices[int(logits[choices].argmax())]
        output.append(last)
        if last in subject.stop_token_ids:
            break
    return output


LETTER = st.sampled_from("abcd")
TEXTS = st.sets(st.text(LETTER, max_size=12), min_size=1, max_size=8)
ENGINES = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 4),
        "num_blocks": st.integers(CONTEXT // BLOCK_SIZE, 24),
        "token_budget": st.integers(4, 24),
        "max_inflight_steps": st.sampled_from([1, 2]),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "is_staged": st.booleans(),
        "right_drafts": st.sampled_from([None, 0.2, 0.9]),
        "filters_drafts": st.booleans(),
    }
)


@st.composite
def any_case(draw: st.DrawFn, number: int) -> tuple[set[str] | None, Request]:
    prompt = np.array(draw(st.lists(st.integers(0, 16), min_size=1, max_size=16)), dtype=np.int32)
    texts = draw(st.none() | TEXTS)
    sampling = SamplingParams(
        temperature=0.0,
        min_tokens=draw(st.sampled_from([0, 0, 5])) if texts else 0,
        ignore_eos=draw(st.booleans()),
        logit_bias=draw(st.dictionaries(st.integers(0, 16), st.sampled_from([-4.0, 3.5]), max_size=2)),
        prompt_logprobs=draw(st.sampled_from([None, 1])),
    )
    count = draw(st.integers(sampling.min_tokens or 1, CONTEXT - len(prompt)))
    stops = (*ENDS, *draw(st.sets(st.integers(0, 4), max_size=1))) if texts else ()
    return texts, request(f"r{number}", prompt, count, sampling, stop_token_ids=stops)


@st.composite
def any_cases(draw: st.DrawFn) -> list[tuple[set[str] | None, Request]]:
    return [draw(any_case(i)) for i in range(draw(st.integers(1, 6)))]


def constrain(subject: Request, texts: set[str], compiler: GrammarCompiler) -> None:
    subject.grammar = RowGrammar(compiler.compile(to_source(Grammar.choice(sorted(texts))), "choice"), ENDS)


@settings(max_examples=examples(30, 100), deadline=None)
@given(cases=any_cases(), engine=ENGINES, fails_at=st.sets(st.integers(1, 40), max_size=2))
def test_tokens_are_those_of_the_definition(
    compiler: GrammarCompiler,
    cases: list[tuple[set[str] | None, Request]],
    engine: dict[str, Any],
    fails_at: set[int],
) -> None:
    """Rows are shared out anew, preempted and come back, and a step may run out of memory and be run again."""
    for texts, subject in cases:
        if texts is not None:
            constrain(subject, texts, compiler)
    Engine(fails_at=tuple(fails_at), **engine).run([subject for _, subject in cases])
    for texts, subject in cases:
        if texts is None:
            continue
        expected = by_definition(subject, texts)
        if subject.output_token_ids and subject.sampling.prompt_logprobs is not None:
            assert len(subject.prompt_logprobs) == subject.num_prompt_tokens - 1
        assert subject.output_token_ids == expected[: len(subject.output_token_ids)]
        if subject.finish_reason is FinishReason.ERROR:
            continue
        assert subject.output_token_ids == expected
        if subject.output_token_ids[-1] in ENDS:
            assert subject.finish_reason is FinishReason.STOP
            assert text_of(subject.output_token_ids[:-1]) in texts
    assert sum(subject.finish_reason is FinishReason.ERROR for _, subject in cases) <= len(fails_at)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_preempted_answers_go_on_in_their_grammar(compiler: GrammarCompiler, steps_in_flight: int) -> None:
    texts = {"abcd" * 7, "abca" * 7, "b" * 28}
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (6, 6), dtype=np.int32)
    requests = [request(f"r{i}", prompt, 30, stop_token_ids=ENDS) for i, prompt in enumerate(prompts)]
    for subject in requests:
        constrain(subject, texts, compiler)
    engine = Engine(max_num_seqs=3, num_blocks=12, token_budget=16, max_inflight_steps=steps_in_flight)
    engine.run(requests)
    assert engine.scheduler.stats().num_preemptions > 0
    assert [subject.output_token_ids for subject in requests] == [by_definition(s, texts) for s in requests]
    assert {subject.finish_reason for subject in requests} == {FinishReason.STOP}


def test_a_grammar_that_leaves_no_token_ends_its_request_alone(compiler: GrammarCompiler) -> None:
    prompt = np.array([1, 2, 3], dtype=np.int32)
    blocked = request("blocked", prompt, 5, stop_token_ids=ENDS, bad_words_ids=((0,),))
    constrain(blocked, {"aa"}, compiler)
    other = request("other", prompt, 5)
    Engine(max_num_seqs=2, num_blocks=12).run([blocked, other])
    assert blocked.finish_reason is FinishReason.ERROR
    assert "[TW-INPUT] no token could follow 0 tokens of output" in str(blocked.error)
    assert other.finish_reason is FinishReason.LENGTH


def test_only_allowed_tokens_of_a_grammar_follow(compiler: GrammarCompiler) -> None:
    """Even where all others would only end the answer too soon."""
    prompt = np.array([1, 2, 3], dtype=np.int32)
    sampling = SamplingParams(temperature=0.0, min_tokens=9, allowed_token_ids=(0, 2, ENDS[1]), prompt_logprobs=1)
    fitting, blocked = (request(name, prompt, 9, sampling, stop_token_ids=ENDS) for name in ("fitting", "blocked"))
    constrain(fitting, {"abc", "ac", "acb", "b"}, compiler)
    constrain(blocked, {"ab"}, compiler)
    Engine(max_num_seqs=2, num_blocks=12, is_staged=True, max_inflight_steps=2).run([fitting, blocked])
    assert (fitting.output_token_ids, fitting.finish_reason) == ([0, 2, ENDS[1]], FinishReason.STOP)
    assert len(fitting.prompt_logprobs) == 2
    assert (blocked.output_token_ids, blocked.finish_reason) == ([0], FinishReason.ERROR)
    assert "[TW-INPUT] no token could follow 1 tokens of output" in str(blocked.error)


class Tiring:
    """Matcher, and pool of matchers, that allow every token, and give up after some."""

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    def deep_copy(self) -> Tiring:
        return Tiring(self._num_left)

    def consume_tokens(self, token_ids: list[int]) -> None:
        self._num_left -= len(token_ids)

    def consume_token(self, _token: int, /) -> None:
        self._num_left -= 1

    def consume_token_par(self, tokens: list[tuple[Any, int]], /) -> None:
        for matcher, token in tokens:
            matcher.consume_token(token)

    def validate_tokens(self, token_ids: list[int]) -> int:
        return len(token_ids)

    def rollback(self, num_tokens: int) -> bool:
        """Take tokens back, unless it has given up."""
        if self.is_error():
            return False
        self._num_left += num_tokens
        return True

    def unsafe_compute_mask_ptr(
        self, rows: list[tuple[Any, int]], address: int, row_bytes: int, _num_rows: int, /
    ) -> None:
        for _, index in rows:
            ctypes.memset(address + index * row_bytes, 0xFF, row_bytes)

    def is_error(self) -> bool:
        return self._num_left <= 0


@pytest.mark.parametrize("right_drafts", [None, 0.5])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_grammars_that_become_too_complex_end_their_requests_alone(
    steps_in_flight: int, right_drafts: float | None
) -> None:
    """Even if they are many, in one step. Wrong drafts after which a grammar would be too complex change nothing."""
    prompt = np.array([1, 2, 3], dtype=np.int32)
    tiring: Any = Tiring(5)
    grammar = RowGrammar(
        TokenGrammar(tiring, tiring, end_bit=0, num_words=VOCABULARY // 32 + 1, tokenizer=tiring), ENDS
    )
    tired = [request(f"tired-{i}", prompt, 20, grammar=grammar) for i in range(7)]
    other = request("other", prompt, 20)
    engine = Engine(max_num_seqs=8, num_blocks=64, max_inflight_steps=steps_in_flight, right_drafts=right_drafts)
    engine.run([*tired, other])
    assert {subject.finish_reason for subject in tired} == {FinishReason.ERROR}
    assert {len(subject.output_token_ids) for subject in tired} == {5}
    assert "no token could follow 5 tokens of output: its grammar has become too complex" in str(tired[0].error)
    assert len(other.output_token_ids) == 20
