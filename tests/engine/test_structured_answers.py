"""Answers of random weights that follow grammars."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import jsonschema
import pytest

from support.engine.json_schemas import WRITTEN, random_schemas
from support.models.tiny_models import save_byte_llama
from tidewheel import LLM, Grammar, RequestOptions, SamplingParams
from tidewheel.errors import InvalidRequest, Unsupported
from tidewheel.llm import GenerationResult

PROMPT = {"input_ids": [5, 6, 7, 8]}
ENDS = (250, 251)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("bytes")
    save_byte_llama(folder)
    with LLM(folder, dtype="float32", num_blocks=256, num_threads=1, max_num_batched_tokens=64) as made:
        yield made


def answers(llm: LLM, grammars: Sequence[Grammar], **sampling: object) -> list[GenerationResult]:
    params = [
        SamplingParams(**{"temperature": 1.0, "max_tokens": 200, "seed": seed, **sampling}, grammar=grammar)
        for seed, grammar in enumerate(grammars)
    ]
    return llm.generate([PROMPT] * len(params), params, use_tqdm=False)


def test_200_schemas(llm: LLM) -> None:
    schemas = [*WRITTEN, *random_schemas(200 - len(WRITTEN))]
    results = answers(llm, [Grammar.json_schema(schema) for schema in schemas])
    assert Counter(result.finish_reason for result in results)["stop"] > 120
    for schema, result in zip(schemas, results, strict=True):
        assert result.finish_reason in ("stop", "length")
        if result.finish_reason == "stop":
            jsonschema.validate(
                json.loads(result.text), schema, format_checker=jsonschema.FormatChecker(["date", "ipv4", "uuid"])
            )
        else:
            assert len(result.token_ids) == 200
    assert llm.stats().num_free_blocks == llm.info.num_blocks


def test_each_kind(llm: LLM) -> None:
    regex, choice, ebnf, lark, whole = answers(
        llm,
        [
            Grammar.regex(r"[a-c]{2,4}-\d"),
            Grammar.choice(["yes", "no", 'per"haps\n']),
            Grammar.ebnf('root ::= "<" [0-9]{1,3} ">"'),
            Grammar.ebnf('start: "<" /[0-9]{1,3}/ ">"'),
            Grammar.json_object(),
        ],
        logit_bias={ord("}") - 33: 50.0},
    )
    assert re.fullmatch(r"[a-c]{2,4}-\d", regex.text)
    assert choice.text in ("yes", "no", 'per"haps\n')
    assert re.fullmatch(r"<[0-9]{1,3}>", ebnf.text)
    assert re.fullmatch(r"<[0-9]{1,3}>", lark.text)
    assert json.loads(whole.text) == {}
    assert {result.finish_reason for result in (regex, choice, ebnf, lark, whole)} == {"stop"}


def test_an_end_is_allowed_where_the_grammar_may_end_alone(llm: LLM) -> None:
    """Here the tokens that end an answer are bytes, which a string could hold."""
    grammar, bias = Grammar.regex("a{4}b{0,9}"), dict.fromkeys(ENDS, 100.0)
    (eager,) = answers(llm, [grammar], logit_bias=bias)
    (later,) = answers(llm, [grammar], logit_bias=bias, min_tokens=7)
    (full,) = answers(llm, [grammar], logit_bias=bias, ignore_eos=True)
    (forced,) = answers(llm, [Grammar.choice(["ab"])], min_tokens=100)
    assert [eager.text, later.text, full.text, forced.text] == ["aaaa", "aaaabbb", "aaaabbbbbbbbb", "ab"]
    assert {result.finish_reason for result in (eager, later, full, forced)} == {"stop"}
    assert {result.token_ids[-1] for result in (eager, later, full, forced)} <= set(ENDS)


def test_a_stop_string_cuts_an_answer(llm: LLM) -> None:
    (result,) = answers(llm, [Grammar.regex("ab{3}c{9}")], stop=("bc",))
    assert (result.text, result.finish_reason) == ("abb", "stop")


def test_sequences_follow_their_own_course(llm: LLM) -> None:
    params = SamplingParams(temperature=3.0, max_tokens=40, seed=1, grammar=Grammar.regex("[0-9]{8}"))
    results = llm.generate(PROMPT, params, RequestOptions(n=4), use_tqdm=False)
    assert len({result.text for result in results}) == 4
    assert all(re.fullmatch("[0-9]{8}", result.text) for result in results)


def test_a_session_goes_on_with_another_grammar(llm: LLM) -> None:
    options = RequestOptions(session_id="s")
    (first,) = llm.generate(PROMPT, SamplingParams(max_tokens=9, grammar=Grammar.regex("[a-f]{5}")), options)
    ids = [*PROMPT["input_ids"], *first.token_ids]
    (second,) = llm.generate(
        {"input_ids": [*ids, 9]}, SamplingParams(max_tokens=9, grammar=Grammar.regex("[0-9]{4}")), options
    )
    assert re.fullmatch("[a-f]{5}", first.text)
    assert re.fullmatch("[0-9]{4}", second.text)
    assert second.num_cached_tokens > 0
    llm.close_session("s")


def test_grammars_that_are_not_supported(llm: LLM) -> None:
    with pytest.raises(Unsupported, match='"not" is not supported'):
        answers(llm, [Grammar.json_schema({"not": {}})])
    with pytest.raises(InvalidRequest, match="grammar is empty"):
        Grammar.regex("")
