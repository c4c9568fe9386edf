"""Answers of the whole engine with drafts, right and wrong, against those without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from support.models.peft_folders import write_peft
from support.models.tiny_models import save_byte_llama
from support.scheduler.always_drafts import always_drafts
from support.scheduler.guesses import Guesses, put_proposer
from tidewheel import LLM, Grammar, RequestOptions, SamplingParams
from tidewheel.llm import GenerationResult
from tidewheel.runner import rank_group
from tidewheel.sampling import TopLogprobs
from tidewheel.scheduler import controllers

VOCABULARY = 256
CHANCES = (0.3, 0.9)  # of a draft to be right
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "is_old": {"type": "boolean"}, "kind": {"const": 7}},
    "required": ["name", "is_old", "kind"],
    "additionalProperties": False,
}


class Ask(NamedTuple):
    """A request: what is sampled at temperature 1 unless it says otherwise."""

    sampling: dict[str, object]
    options: RequestOptions = RequestOptions()
    prompt: tuple[int, ...] = (5, 6, 7, 8, 9)

    def params(self, seed: int) -> SamplingParams:
        return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 24, **self.sampling})  # type: ignore[arg-type]


ASKS = {
    "greedy": Ask({"temperature": 0.0}),
    "drawn": Ask({}, prompt=tuple(range(40))),
    "truncated": Ask({"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    "several": Ask({"temperature": 1.5}, RequestOptions(n=3)),
    "penalties": Ask(
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    ),
    "repetition": Ask({"temperature": 0.3, "repetition_penalty": 0.5, "frequency_penalty": -1.0}),
    "bad words": Ask({"temperature": 0.0, "bad_words": ("a", "bc", "é")}),
    "bias": Ask({"temperature": 0.0, "logit_bias": {40: 3.0, 41: 4.0}}),
    "allowed": Ask({"allowed_token_ids": (40, 41, 42, 43)}),
    "stop string": Ask(
        {"temperature": 0.0, "max_tokens": 60, "allowed_token_ids": (64, 65, 66), "stop": ("ab", "cca")}
    ),
    "stop tokens": Ask({"max_tokens": 60, "allowed_token_ids": tuple(range(60, 72)), "stop_token_ids": (66,)}),
    "late stop": Ask({"max_tokens": 60, "allowed_token_ids": (64, 65, 66), "stop_token_ids": (66,), "min_tokens": 9}),
    "log-probabilities": Ask({"logprobs": 3, "prompt_logprobs": 2}, RequestOptions(n=2)),
    "one token": Ask({"max_tokens": 1, "logprobs": 0}),
    "three tokens": Ask({"max_tokens": 3}),
    "schema": Ask({"grammar": Grammar.json_schema(SCHEMA), "max_tokens": 60}),
    "schema, greedy": Ask({"grammar": Grammar.json_schema(SCHEMA), "max_tokens": 60, "temperature": 0.0}),
    "pattern": Ask({"grammar": Grammar.regex(r"[a-c]{2,4}-\d{1,20}"), "logprobs": 1}),
    "late end": Ask({"grammar": Grammar.regex(r"a{4}b{0,9}"), "min_tokens": 7}, RequestOptions(n=2)),
    "no end": Ask({"grammar": Grammar.regex(r"a{4}b{0,9}"), "ignore_eos": True}),
    "choice": Ask({"grammar": Grammar.choice(["yes, certainly", "yes, probably", "no"])}),
    "dead end": Ask({"grammar": Grammar.regex("a{3}b{9}"), "bad_words": ("b",)}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes")
    save_byte_llama(path, intermediate_size=128)  # quantised formats need multiples of 32
    return path


@contextmanager
def load(folder: Path, **settings: object) -> Iterator[LLM]:
    defaults = {"dtype": "float32", "num_blocks": 256, "num_threads": 1, "max_model_len": 256, "device": "cpu"}
    with LLM(folder, **{**defaults, **settings}) as llm:
        yield llm
        stats = llm.stats()
        if not stats.num_sessions:
            assert stats.num_free_blocks == llm.info.num_blocks


def answers(llm: LLM, asks: Sequence[Ask]) -> list[GenerationResult]:
    params = [ask.params(seed) for seed, ask in enumerate(asks)]
    given = [{"input_ids": list(ask.prompt)} for ask in asks]
    return llm.generate(given, params, [ask.options for ask in asks], use_tqdm=False)


def follower(asks: Sequence[Ask], results: Sequence[GenerationResult]) -> Callable[[Sequence[int]], int | None]:
    """Return a function of the next token of the first answer that begins so."""
    prompts = [ask.prompt for ask in asks for _ in range(ask.options.n)]
    whole = [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]

    def follow(tokens: Sequence[int]) -> int | None:
        count = len(tokens)
        return next((one[count] for one in whole if len(one) > count and one[:count] == list(tokens)), None)

    return follow


def draft(
    llm: LLM, asks: Sequence[Ask], expected: Sequence[GenerationResult], chance: float, *, filters: bool
) -> None:
    guesses = Guesses(llm.info.max_num_seqs, VOCABULARY, follower(asks, expected), chance)
    put_proposer(llm._scheduler, guesses, filters_drafts=filters)


def numbers(entries: Sequence[TopLogprobs | None] | None) -> list[float]:
    return [value for entry in entries or () if entry for value in (entry.logprob, *entry.top_logprobs)]


def ids(entries: Sequence[TopLogprobs | None] | None) -> list[tuple[int, tuple[int, ...]] | None] | None:
    return entries and [entry and (entry.rank, entry.top_ids) for entry in entries]


def check_equal(found: Sequence[GenerationResult], expected: Sequence[GenerationResult]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert str(one.error) == str(other.error)
        for logprobs, others in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert ids(logprobs) == ids(others)
            assert numbers(logprobs) == pytest.approx(numbers(others), abs=1e-4)


def check_drafts(llm: LLM, chance: float) -> None:
    stats = llm.stats()
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_draft_tokens > (stats.num_draft_tokens // 3 if chance > 0.5 else 0)


SETTINGS: dict[str, dict[str, object]] = {
    "usual": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "small steps": {"max_num_batched_tokens": 24},
    "few rows": {"max_num_seqs": 3},
    "ahead": {"async_scheduling": True},
    "recompute": {"num_blocks": 16, "max_num_batched_tokens": 64, "admit_by_growth": False, "max_num_seqs": 8},
    "swap": {
        "num_blocks": 16, "max_num_batched_tokens": 64, "admit_by_growth": False, "max_num_seqs": 8,
        "preemption_mode": "swap", "swap_space": 0.01,
    },
    "int8 cache": {"kv_cache_dtype": "int8"},
    "int8 weights": {"quantization": "int8"},
    "pressure": {"pressure_quantization": "int8", "pressure_memory": 0.01, "pressure_latency_ms": 60_000.0},
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_drafts_change_no_answer(folder: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "HOLD_S", 1e9)  # a clock that goes on changes no weights
    asks = list(ASKS.values())
    with load(folder, **settings) as llm:
        expected = answers(llm, asks)
        assert (llm.stats().num_preemptions > 0) == ("num_blocks" in settings)
    assert {"quantized", "mixed"} & {result.weights for result in expected} or "pressure_memory" not in settings
    assert {result.finish_reason for result in expected} == {"stop", "length", "error"}
    for chance in CHANCES:
        with load(folder, **settings, speculation="prompt_lookup") as llm:
            draft(llm, asks, expected, chance, filters=chance > 0.5)
            check_equal(answers(llm, asks), expected)
            check_drafts(llm, chance)


def test_drafts_with_adapters(folder: Path, tmp_path: Path) -> None:
    modules = {name: str(write_peft(tmp_path / name, folder, seed=seed)) for seed, name in enumerate("ab")}
    settings = {"enable_lora": True, "lora_modules": json.dumps(modules), "max_loras": 2}
    asks = [
        Ask({"temperature": temperature, "logprobs": 1}, RequestOptions(lora_name=name, n=2))
        for name in ("", "a", "b")
        for temperature in (0.0, 1.0)
    ]
    with load(folder, **settings) as llm:
        expected = answers(llm, asks)
    assert len({str(result.token_ids) for result in expected}) > 6
    with load(folder, **settings, speculation="prompt_lookup") as llm:
        for chance in CHANCES:
            draft(llm, asks, expected, chance, filters=False)
            check_equal(answers(llm, asks), expected)
        check_drafts(llm, 0.3)


@pytest.mark.parametrize("settings", [{"num_threads": 1}, {"num_threads": 2}, {"async_scheduling": True}], ids=str)
def test_a_draft_model_beside_grammars_and_adapters(
    folder: Path, tmp_path: Path, settings: dict[str, object]
) -> None:
    """Some rows have drafts of the draft model, others of their grammar, and others none."""
    modules = {"a": str(write_peft(tmp_path / "a", folder, seed=1))}
    settings = {**settings, "enable_lora": True, "lora_modules": json.dumps(modules), "max_num_seqs": 6}
    asks = [*ASKS.values(), *(ask._replace(options=RequestOptions(lora_name="a")) for ask in ASKS.values())]
    with load(folder, **settings) as llm:
        expected = answers(llm, asks)
    drafting = {"speculation": "draft_model", "draft_model": str(folder), "num_speculative_tokens": 3}
    with always_drafts(), load(folder, **settings, **drafting) as llm:
        check_equal(answers(llm, asks), expected)
        assert llm.stats().num_accepted_draft_tokens > len(asks)


def test_drafts_over_two_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "HANG_S", 60.0)  # a busy machine is no rank that hangs
    asks = list(ASKS.values())
    with load(folder, tensor_parallel_size=2) as llm:
        expected = answers(llm, asks)
    with load(folder, tensor_parallel_size=2, speculation="prompt_lookup") as llm:
        for chance in CHANCES:
            draft(llm, asks, expected, chance, filters=False)
            check_equal(answers(llm, asks), expected)
        check_drafts(llm, 0.3)


@pytest.mark.parametrize("num_blocks", [256, 9])
def test_drafts_in_sessions(folder: Path, num_blocks: int) -> None:
    """A turn finds the blocks of accepted tokens, and of no others."""

    def turns(llm: LLM, expected: Sequence[GenerationResult] = (), chance: float = 0.0) -> list[GenerationResult]:
        results: list[GenerationResult] = []
        prompt = tuple(range(30))
        for turn in range(4):
            ask = Ask({"temperature": turn % 2, "max_tokens": 20}, RequestOptions(session_id="s"), prompt)
            if expected:
                draft(llm, [ask], expected[turn : turn + 1], chance, filters=False)
            results += answers(llm, [ask])
            prompt = (*prompt, *results[-1].token_ids, 7, turn)
        llm.close_session("s")
        return results

    sizes = {"num_blocks": num_blocks, "max_model_len": 144}
    with load(folder, **sizes) as llm:
        expected = turns(llm)
    for chance in CHANCES:
        with load(folder, **sizes, speculation="prompt_lookup") as llm:
            found = turns(llm, expected, chance)
            check_equal(found, expected)
            assert [one.num_cached_tokens for one in found] == [other.num_cached_tokens for other in expected]
            check_drafts(llm, chance)
