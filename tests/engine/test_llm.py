"""The whole engine in-process, with small random models in float32: tokens must equal those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from msgspec.structs import replace
from transformers import PreTrainedModel

from support.models.tiny_models import (
    clear_prompts,
    llama,
    prompts,
    qwen3,
    save,
    save_byte_llama,
    transformers_tokens,
)
from tidewheel import LLM, RequestOptions, SamplingParams
from tidewheel.batch import Int32Array
from tidewheel.errors import Busy, ConfigError, DeadlineExceeded, InvalidRequest, NotFound
from tidewheel.request import Priority

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)


class Reference(NamedTuple):
    folder: Path
    model: PreTrainedModel
    prompts: list[Int32Array]
    tokens: list[list[int]]


@pytest.fixture(scope="module", params=[llama, qwen3], ids=["llama", "qwen3"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("model")
    model = save(request.param, folder)
    given, tokens = clear_prompts(model, prompts(36, 1, 90), 31, NUM_TOKENS)
    given.append(np.concatenate([given[0], given[1]]))  # begins as another one does
    tokens += transformers_tokens(model, given[31:], NUM_TOKENS)
    return Reference(folder, model, given, tokens)


def load(folder: Path, **settings: object) -> LLM:
    defaults = {"dtype": "float32", "num_blocks": 64, "skip_tokenizer_init": True, "num_threads": 1}
    return LLM(folder, **{**defaults, **settings})


@pytest.fixture(scope="module")
def shared(reference: Reference) -> Iterator[LLM]:
    with load(reference.folder) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """Return an engine with default settings that runs nothing, and expect it back so."""
    yield shared
    stats = shared.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_sessions) == (0, 0, 0)
    assert stats.num_free_blocks == shared.info.num_blocks


def generate(llm: LLM, given: list[Int32Array]) -> list[list[int]]:
    results = llm.generate([{"input_ids": ids} for ids in given], GREEDY, use_tqdm=False)
    assert {result.finish_reason for result in results} == {"length"}
    return [result.token_ids for result in results]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 64, "block_size": 32},
        {"block_size": 64},
        {"block_size": 128},
        {"max_num_seqs": 3, "max_waiting_requests": 2},
        {"enable_prefix_caching": False},
    ],
    ids=lambda settings: ",".join(f"{name}={value}" for name, value in settings.items()) or "defaults",
)
def test_greedy_tokens_equal_those_of_transformers(reference: Reference, settings: dict[str, object]) -> None:
    with load(reference.folder, **settings) as llm:
        assert generate(llm, reference.prompts) == reference.tokens
        assert llm.stats().num_free_blocks == llm.info.num_blocks


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
def test_preemption_changes_no_token(reference: Reference, prefix_caching: bool) -> None:
    short = [ids[:60] for ids in reference.prompts[:12]]
    expected = transformers_tokens(reference.model, short, NUM_TOKENS)
    tiny = {
        "num_blocks": 8,
        "max_model_len": 96,
        "max_num_batched_tokens": 24,
        "admit_by_growth": False,
        "enable_prefix_caching": prefix_caching,
    }
    with load(reference.folder, **tiny) as llm:
        assert generate(llm, short) == expected
        assert llm.stats().num_preemptions > 0


def test_alone_and_again_the_tokens_are_the_same(reference: Reference) -> None:
    with load(reference.folder) as llm:
        longest = max(range(31), key=lambda index: len(reference.prompts[index]))
        for _ in range(2):
            result = llm.generate({"prompt_token_ids": reference.prompts[longest].tolist()}, GREEDY, use_tqdm=False)[
                0
            ]
            assert result.token_ids == reference.tokens[longest]
        assert result.num_prompt_tokens == len(reference.prompts[longest])
        assert result.num_cached_tokens == (result.num_prompt_tokens - 1) // 16 * 16
        assert llm.stats().num_prefix_hits == result.num_cached_tokens


def test_parameters_for_each_prompt(reference: Reference, llm: LLM) -> None:
    given = [{"input_ids": ids} for ids in reference.prompts[:3]]
    expected = reference.tokens[0]
    params = [
        SamplingParams(temperature=0.0, max_tokens=3),
        SamplingParams(temperature=0.0, max_tokens=2, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(reference.tokens[2][4],)),
    ]
    first, second, third = llm.generate(given, params, use_tqdm=False)
    assert first.token_ids == expected[:3] and first.logprobs is None and first.cumulative_logprob is None
    assert second.logprobs is not None and [len(entry.top_ids) for entry in second.logprobs] == [2, 2]
    assert [entry.rank for entry in second.logprobs] == [1, 1]
    assert second.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in second.logprobs))
    cut = reference.tokens[2].index(reference.tokens[2][4]) + 1
    assert (third.token_ids, third.finish_reason) == (reference.tokens[2][:cut], "stop")


def test_biases_reach_the_model(reference: Reference, llm: LLM) -> None:
    prompt = {"input_ids": reference.prompts[0]}
    forced = replace(GREEDY, logit_bias={77: -100.0, 42: 100.0})
    assert llm.generate(prompt, forced, use_tqdm=False)[0].token_ids == [42] * NUM_TOKENS


def test_tokens_that_are_allowed_and_a_prompt_that_is_cut(reference: Reference, llm: LLM) -> None:
    ids = reference.prompts[0]
    allowed = replace(GREEDY, allowed_token_ids=(17, 42, 77))
    few, whole, cut, last = llm.generate(
        [{"input_ids": ids}] * 3 + [{"input_ids": ids[-3:]}],
        [allowed, GREEDY, replace(GREEDY, truncate_prompt_tokens=3), GREEDY],
        use_tqdm=False,
    )
    assert set(few.token_ids) <= {17, 42, 77}
    assert not set(whole.token_ids) <= {17, 42, 77}
    assert (cut.token_ids, cut.num_prompt_tokens) == (last.token_ids, 3)
    room = llm.info.max_num_tokens - NUM_TOKENS
    long = {"input_ids": np.tile(ids, 100)}
    fitting = replace(GREEDY, truncate_prompt_tokens=-1, max_tokens=NUM_TOKENS)
    assert llm.generate(long, fitting, use_tqdm=False)[0].num_prompt_tokens == room


def test_log_probabilities_of_prompts(reference: Reference) -> None:
    """Tokens are as likely as after shorter prompts, though the prompt is cached, cut, and has two answers."""
    ids = np.tile(reference.prompts[0], 10)[:40]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2, logprobs=2)
    with load(reference.folder, block_size=16, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        llm.generate({"input_ids": ids}, GREEDY, use_tqdm=False)
        answers = llm.generate({"input_ids": ids}, params, RequestOptions(n=2), use_tqdm=False)
        forced = [replace(params, prompt_logprobs=None, allowed_token_ids=(int(token),)) for token in ids[1:]]
        prefixes = [{"input_ids": ids[:count]} for count in range(1, len(ids))]
        after_prefixes = llm.generate(prefixes, forced, use_tqdm=False)
    for answer in answers:
        assert answer.prompt_logprobs is not None
        first, *others = answer.prompt_logprobs
        assert first is None
        for one, after in zip(others, after_prefixes, strict=True):
            assert after.logprobs is not None and one is not None
            assert (one.rank, one.top_ids) == (after.logprobs[0].rank, after.logprobs[0].top_ids)
            assert one.logprob == pytest.approx(after.logprobs[0].logprob, abs=1e-4)
    assert after_prefixes[0].prompt_logprobs is None


def test_seeds_repeat_whatever_else_runs(reference: Reference, llm: LLM) -> None:
    prompt = {"input_ids": reference.prompts[5]}
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
    free = SamplingParams(temperature=1.0, max_tokens=12)
    alone = llm.generate(prompt, seeded, use_tqdm=False)[0]
    among = llm.generate([prompt] * 4, [free, seeded, free, free], use_tqdm=False)
    assert among[1].token_ids == alone.token_ids
    assert len({tuple(result.token_ids) for result in among}) == 4


def test_an_end_of_sequence_id_that_the_model_cannot_output(tmp_path: Path) -> None:
    save(llama, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 384, 100_000]}))
    with load(tmp_path) as llm:
        (result,) = llm.generate({"input_ids": [1, 2, 3]}, GREEDY, use_tqdm=False)
    assert result.error is None
    assert result.finish_reason == "length" or result.token_ids[-1] == 5


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [({}, 0.0), ({"generation_config": "auto"}, 0.0), ({"generation_config": "vllm"}, 1.0)],
)
def test_default_sampling(tmp_path: Path, settings: dict[str, object], temperature: float) -> None:
    save(llama, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    overrides = {"max_new_tokens": 3, "top_k": 9}
    with load(tmp_path, override_generation_config=overrides, **settings) as llm:
        assert llm._core is not None
        with mock.patch.object(llm._core, "add_group", wraps=llm._core.add_group) as added:
            (result,) = llm.generate({"input_ids": [1, 2, 3]}, use_tqdm=False)
    given = added.call_args.args[0][0].sampling
    assert (given.temperature, given.top_k) == (temperature, 9)
    assert len(result.token_ids) == 3


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ("text", GREEDY, "need a tokenizer"),
        ({"input_ids": [1]}, SamplingParams(stop=("x",)), "need a tokenizer"),
        ({"input_ids": []}, GREEDY, "empty"),
        ({"input_ids": [[1, 2]]}, GREEDY, "2 axes"),
        ({"input_ids": [1.5]}, GREEDY, "float64"),
        ({"input_ids": [2**40]}, GREEDY, "1099511627776"),
        ({"input_ids": [384]}, GREEDY, "ids are 0 to 383"),
        ({"input_ids": [1], "text": "x"}, GREEDY, "not a dict with"),
        ({"input_ids": [1] * 256}, GREEDY, "256 tokens"),
        ({"input_ids": [1]}, SamplingParams(logit_bias={384: 1.0}), "logit_bias has token id 384"),
        ({"input_ids": [1]}, [GREEDY, GREEDY], "2 params for 1 prompts"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(
    reference: Reference, llm: LLM, prompt: object, params: object, text: str
) -> None:
    num_steps = llm.stats().num_steps
    with pytest.raises(InvalidRequest, match=text):
        llm.generate([prompt], params, use_tqdm=False)  # type: ignore[arg-type,list-item]
    assert llm.stats().num_steps == num_steps
    assert generate(llm, reference.prompts[:1]) == reference.tokens[:1]


def test_an_interrupted_run_leaves_the_engine_usable(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(reference.folder) as llm:
        core = llm._open_core()
        step, num_steps = core.step, iter(range(5))

        def interrupted() -> bool:
            if next(num_steps, None) is None:
                raise KeyboardInterrupt
            return step()

        monkeypatch.setattr(core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, reference.prompts)
        monkeypatch.undo()
        assert llm.stats().num_free_blocks == llm.info.num_blocks
        assert generate(llm, reference.prompts) == reference.tokens


def test_settings_are_checked(reference: Reference) -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_blocks'"):
        load(reference.folder, num_block=3)
    with pytest.raises(ConfigError, match="block_size is 48: choose one of 16, 32, 64, 128"):
        load(reference.folder, block_size=48)


def test_closed_is_closed(reference: Reference) -> None:
    llm = load(reference.folder)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate({"input_ids": [1]}, GREEDY)


# --- with a tokenizer: ids are bytes ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("bytes")
    model = save_byte_llama(folder)
    with load(folder, skip_tokenizer_init=False) as llm:
        assert llm._tokenizer is not None
        prompt = llm._tokenizer.encode("The sea", add_special_tokens=False)
        transformers_tokens(model, [prompt], 256 - len(prompt))  # clear choices, which tests compare
        yield llm


@pytest.fixture(scope="module")
def decode(byte_llm: LLM) -> Callable[[list[int]], str]:
    tokenizer = byte_llm._tokenizer
    assert tokenizer is not None
    return tokenizer.decode


LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def test_text_in_text_out(byte_llm: LLM, decode: Callable[[list[int]], str]) -> None:
    result = byte_llm.generate("The sea", LONG, use_tqdm=False)[0]
    assert result.num_prompt_tokens == 7
    assert result.text == decode(result.token_ids)


def test_a_stop_string_cuts_text_and_ends_the_request(byte_llm: LLM) -> None:
    whole = byte_llm.generate("The sea", LONG, use_tqdm=False)[0]
    pairs = [(index, whole.text[index : index + 2]) for index in range(4, 36)]
    index, stop = next((i, pair) for i, pair in pairs if pair.isascii() and pair not in whole.text[: i + 1])
    results = byte_llm.generate(
        ["The sea"] * 2,
        [replace(LONG, stop=(stop,), include_stop_str_in_output=keep) for keep in (False, True)],
        use_tqdm=False,
    )
    assert [result.text for result in results] == [whole.text[:index], whole.text[: index + 2]]
    assert {result.finish_reason for result in results} == {"stop"}
    assert all(len(result.token_ids) < 40 for result in results)
    assert byte_llm.stats().num_free_blocks == byte_llm.info.num_blocks


def test_a_stop_token_is_no_text(byte_llm: LLM, decode: Callable[[list[int]], str]) -> None:
    whole = byte_llm.generate("The sea", LONG, use_tqdm=False)[0]
    stop = replace(LONG, stop_token_ids=(whole.token_ids[6],))
    result = byte_llm.generate("The sea", stop, use_tqdm=False)[0]
    assert result.finish_reason == "stop" and result.token_ids[-1] == whole.token_ids[6]
    assert result.text == decode(result.token_ids[:-1])


def test_the_models_own_defaults(byte_llm: LLM) -> None:
    results = byte_llm.generate(["The sea"] * 2, use_tqdm=False)
    assert results[0] == results[1]  # temperature 0
    tokens = results[0].token_ids
    eos = [index for index, token in enumerate(tokens) if token in (250, 251)]
    if results[0].finish_reason == "stop":
        assert eos == [len(tokens) - 1]
    else:
        assert not eos and len(tokens) == 256 - 7


def test_bad_words_never_appear(byte_llm: LLM) -> None:
    whole = byte_llm.generate("The sea", LONG, use_tqdm=False)[0]
    char = next(char for char in whole.text if char.isascii() and char.isalnum())
    params = replace(LONG, bad_words=(char,))
    assert char not in byte_llm.generate("The sea", params, use_tqdm=False)[0].text


def test_the_progress_bar_counts_prompts(byte_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    byte_llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    assert "2/2" in capsys.readouterr().err


# --- how requests are served --------------------------------------------------------------------------------------


def test_sequences_of_one_prompt(reference: Reference, llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
    given = [{"input_ids": ids} for ids in reference.prompts[3:5]]
    alone = [
        llm.generate(prompt, replace(seeded, seed=7 + index), use_tqdm=False)[0].token_ids
        for prompt in given
        for index in range(3)
    ]
    results = llm.generate(given, seeded, RequestOptions(n=3), use_tqdm=False)
    assert [result.index for result in results] == [0, 1, 2, 0, 1, 2]
    assert [result.token_ids for result in results] == alone
    assert len({tuple(result.token_ids) for result in results[:3]}) == 3
    assert llm.stats().num_free_blocks == llm.info.num_blocks


def test_options_for_each_prompt(reference: Reference) -> None:
    given = [{"input_ids": ids} for ids in reference.prompts[:3]]
    options = [RequestOptions(priority=Priority.LOW), RequestOptions(n=2), RequestOptions(tenant="acme")]
    with load(reference.folder, max_num_seqs=1, max_waiting_requests=2) as llm:
        results = llm.generate(given, GREEDY, options, use_tqdm=False)
        assert [result.token_ids for result in results] == [reference.tokens[index] for index in (0, 1, 1, 2)]
        with pytest.raises(InvalidRequest, match="2 options for 3 prompts"):
            llm.generate(given, GREEDY, options[:2], use_tqdm=False)


def test_a_deadline_that_has_passed(reference: Reference, llm: LLM) -> None:
    given = [{"input_ids": ids} for ids in reference.prompts[:2]]
    options = [RequestOptions(deadline_ms=1e-6), RequestOptions(deadline_ms=1e12)]
    late, whole = llm.generate(given, GREEDY, options, use_tqdm=False)
    assert (late.finish_reason, late.token_ids, type(late.error)) == ("error", [], DeadlineExceeded)
    assert (whole.finish_reason, whole.token_ids, whole.error) == ("length", reference.tokens[1], None)


def test_a_tenant_over_its_rate(reference: Reference) -> None:
    prompt = {"input_ids": reference.prompts[0]}
    with load(reference.folder, tenants={"acme": {"requests_per_s": 0.001}}) as llm:
        results = llm.generate([prompt] * 2, GREEDY, RequestOptions(tenant="acme"), use_tqdm=False)
    assert [result.finish_reason for result in results] == ["length", "error"]
    assert isinstance(results[1].error, Busy)
    assert (results[1].error.retry_after_ms or 0) > 0


def test_a_session_pays_for_new_tokens_only(reference: Reference) -> None:
    options = RequestOptions(session_id="chat", tenant="acme", session_ttl_s=600)
    first = reference.prompts[8]
    with load(reference.folder) as llm:
        (turn,) = llm.generate({"input_ids": first}, GREEDY, options, use_tqdm=False)
        second = np.concatenate([first, np.array(turn.token_ids, dtype=np.int32), reference.prompts[2]])
        assert llm.stats().num_sessions == 1
        (again,) = llm.generate({"input_ids": second}, GREEDY, options, use_tqdm=False)
        # The last token of the first turn was sampled and never computed.
        assert again.num_cached_tokens == len(first) + NUM_TOKENS - 1
        (fresh,) = llm.generate({"input_ids": second}, GREEDY, RequestOptions(tenant="x"), use_tqdm=False)
        assert fresh.num_cached_tokens == 0
        assert [again.token_ids] == [fresh.token_ids] == transformers_tokens(reference.model, [second], NUM_TOKENS)
        llm.close_session("chat", tenant="acme")
        assert llm.stats().num_sessions == 0
        with pytest.raises(NotFound):
            llm.close_session("chat", tenant="acme")
