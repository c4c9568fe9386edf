"""Whisper on the paged cache: the tokens of transformers, alone and in every mixture; audio that is no audio."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from support.models import tiny_whisper
from support.models.tiny_models import MARGIN
from support.runner.step_loop import poison
from support.scheduler.invariants import check_invariants
from tidewheel.config import EngineConfig
from tidewheel.engine.build import engine_info, load_model_runner, scheduler_config
from tidewheel.engine.messages import AddRequest, EngineInfo
from tidewheel.engine.requests import to_requests
from tidewheel.errors import ConfigError, InvalidRequest, TidewheelError
from tidewheel.frontend.output import Generation
from tidewheel.frontend.request_reader import MessageMaker
from tidewheel.frontend.settings import GenerationDefaults
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.llm import LLM
from tidewheel.one_shot.shared_tensors import PackedTensor, PackedTensors
from tidewheel.one_shot.signature import Array
from tidewheel.request import Priority, Request
from tidewheel.request_options import RequestOptions
from tidewheel.runner import encoder_cache
from tidewheel.runner.loading import load_parts
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.sampling import SamplingParams
from tidewheel.scheduler.scheduler import Scheduler

NUM_AUDIOS = 6
NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)


class Case(NamedTuple):
    folder: Path
    model: PreTrainedModel
    config: EngineConfig
    runner: ModelRunner
    info: EngineInfo
    audios: list[Array]
    expected: list[list[int]]

    def message(self, audio: Array | None, sampling: SamplingParams = GREEDY, **options: object) -> AddRequest:
        maker = MessageMaker(self.info, None, GenerationDefaults.load(Path(self.info.model)))
        assert maker.speech is not None
        prompt = maker.speech.prompt("en", translate=False)
        message, _ = maker.prepare(1, Generation(prompt, sampling, RequestOptions(**options), audio=audio), 1)
        return message

    def request(self, name: str, audio: int, num_tokens: int = NUM_TOKENS, **options: object) -> Request:
        sampling = msgspec.structs.replace(GREEDY, max_tokens=num_tokens)
        message = self.message(self.audios[audio], sampling, **options)
        return to_requests(message, self.info, self.config, request_ids=[name], seed=0, now=0.0)[0]

    def scheduler(self, num_blocks: int, **changes: int) -> Scheduler:
        plain = dataclasses.replace(self.config, admit_by_growth=False, **changes)
        config = dataclasses.replace(scheduler_config(plain, self.info), watermark=0.0)
        return Scheduler(config, KVCacheManager(num_blocks, self.info.block_size, enable_prefix_caching=True))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whisper")
    model = tiny_whisper.save(folder)
    audios, expected = [], []
    for seed in range(4 * NUM_AUDIOS):
        audio = tiny_whisper.audio(seed, (2.0, 1.3, 0.01)[seed % 3])
        answer = tiny_whisper.transcribe(model, audio, NUM_TOKENS)
        if answer.margin >= MARGIN and len(audios) < NUM_AUDIOS:
            audios.append(audio)
            expected.append(answer.tokens)
    assert len(audios) == NUM_AUDIOS and len(set(map(tuple, expected))) > 3
    config = EngineConfig(
        model=str(folder), dtype="float32", device="cpu", max_num_seqs=3, num_blocks=64, block_size=16, num_threads=1
    )
    runner = load_model_runner(config)
    assert isinstance(runner, ModelRunner)
    return Case(folder, model, config, runner, engine_info(runner.info, config), audios, expected)


class Arrival(NamedTuple):
    audio: int
    step: int
    num_tokens: int
    priority: Priority
    cancelled_after: int | None  # steps


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.integers(0, NUM_AUDIOS - 1),
        st.integers(0, 12),
        st.integers(1, NUM_TOKENS),
        st.sampled_from([Priority.CRITICAL, Priority.NORMAL, Priority.LOW]),
        st.one_of(st.none(), st.integers(0, 15)),
    ),
    min_size=1,
    max_size=8,
)


def run(case: Case, scheduler: Scheduler, arrivals: Sequence[Arrival]) -> list[Request]:
    requests = [case.request(f"{i}", a.audio, a.num_tokens, priority=a.priority) for i, a in enumerate(arrivals)]
    step = 0
    while scheduler.has_unfinished or step <= max(arrival.step for arrival in arrivals):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival.step == step:
                scheduler.add_group([request], float(step))
            if arrival.cancelled_after is not None and arrival.step + arrival.cancelled_after == step:
                scheduler.cancel(request.request_id)
        batch = scheduler.schedule(float(step))
        if batch is not None:
            scheduler.apply(batch, case.runner.run(batch), float(step))
        step += 1
    check_invariants(scheduler)
    return requests


@settings(max_examples=40, deadline=None)
@given(ARRIVALS, st.sampled_from([4, 6, 64]))
def test_tokens_in_every_mixture_are_those_of_transformers(
    case: Case, arrivals: list[Arrival], num_blocks: int
) -> None:
    poison(case.runner)
    for request, arrival in zip(run(case, case.scheduler(num_blocks), arrivals), arrivals, strict=True):
        expected = case.expected[arrival.audio][: arrival.num_tokens]
        if arrival.cancelled_after is None:
            assert request.output_token_ids == expected
        assert request.output_token_ids == expected[: request.num_output_tokens]


def test_a_preempted_request_goes_on_with_its_audio(case: Case) -> None:
    arrivals = [
        *(Arrival(audio, 0, NUM_TOKENS, Priority.LOW, None) for audio in (0, 1, 2)),
        *(Arrival(audio, 9, NUM_TOKENS, Priority.CRITICAL, None) for audio in (3, 4, 5)),
    ]
    requests = run(case, case.scheduler(6), arrivals)
    assert sum(request.num_preemptions for request in requests) >= 1
    assert [request.output_token_ids for request in requests] == case.expected


def test_languages_are_those_that_transformers_finds(case: Case) -> None:
    maker = MessageMaker(case.info, None, GenerationDefaults.load(Path(case.info.model)))
    assert maker.speech is not None
    rules, prompt = maker.speech, maker.speech.prompt("en", translate=False)
    scheduler, requests, expected = case.scheduler(64), [], []
    for seed in range(3 * NUM_AUDIOS):
        audio = tiny_whisper.audio(seed, (2.0, 1.3)[seed % 2])
        found = tiny_whisper.detect_language(case.model, audio)
        window = Generation(prompt, GREEDY, RequestOptions(n=2), audio=audio)
        message, _ = maker.prepare(1, rules.question(window), 1)
        (request,) = to_requests(message, case.info, case.config, request_ids=[f"{seed}"], seed=0, now=0.0)
        if found.margin >= MARGIN:
            scheduler.add_group([request], 0.0)
            requests.append(request)
            expected.append(found.tokens[0])
    while scheduler.has_unfinished:
        batch = scheduler.schedule(0.0)
        assert batch is not None
        scheduler.apply(batch, case.runner.run(batch), 0.0)
    assert [request.output_token_ids for request in requests] == [[token] for token in expected]
    found_in = [rules.in_language(window, token) for token in set(expected)]
    assert {one.language for one in found_in} == {"en", "de"}
    assert {tuple(one.prompt_ids) for one in found_in} == {
        tuple(rules.prompt(name, translate=False)) for name in ("en", "de")
    }


def test_the_same_audio_is_encoded_once(case: Case) -> None:
    encoder = case.runner._steps.encoder
    assert encoder is not None
    run(case, case.scheduler(64), [Arrival(audio, 0, 1, Priority.NORMAL, None) for audio in (3, 4, 5)])
    before = encoder.num_encoded
    run(case, case.scheduler(64), [Arrival(0, step, 3, Priority.NORMAL, None) for step in (0, 0, 1, 9)])
    assert encoder.num_encoded == before + 1
    other = case.request("salted", 0, 1, cache_salt="other")
    scheduler = case.scheduler(64)
    scheduler.add_group([other], 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    scheduler.apply(batch, case.runner.run(batch), 0.0)
    assert encoder.num_encoded == before + 2, "requests of two salts share nothing"


def test_encoders_of_a_step_stay_within_its_tokens(case: Case) -> None:
    positions = 50 * tiny_whisper.SECONDS
    for budget, num_entered in ((2 * positions, 2), (positions - 1, 1)):
        scheduler = case.scheduler(64, max_num_batched_tokens=budget)
        for index in range(3):
            scheduler.add_group([case.request(f"{index}", index)], 0.0)
        batch = scheduler.schedule(0.0)
        assert batch is not None and len(batch.rows) == num_entered


def test_llm_takes_languages_and_other_sequences(case: Case) -> None:
    audio = case.audios[0]
    with LLM(case.folder, dtype="float32", num_blocks=64, block_size=16, num_threads=1) as llm:
        one, *both = llm.generate(
            [{"audio": audio, "language": "en"}, {"audio": audio, "language": "de", "translate": True}],
            [GREEDY, GREEDY],
            [RequestOptions(), RequestOptions(n=2)],
            use_tqdm=False,
        )
        assert one.token_ids == case.expected[0] and one.num_prompt_tokens == len(tiny_whisper.PROMPT)
        german = tiny_whisper.transcribe(case.model, audio, NUM_TOKENS, language="de", task="translate")
        assert german.margin < MARGIN or both[0].token_ids == both[1].token_ids == german.tokens
        for prompt, words in (
            ({"audio": audio, "language": "xx"}, "language is 'xx'"),
            ({"audio": audio}, "de, en"),
            ({"input_ids": [1]}, "takes {'audio'"),
            ("text", "takes {'audio'"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                llm.generate([prompt], GREEDY, use_tqdm=False)


def test_drafts_of_prompt_lookup_change_no_token(case: Case) -> None:
    settings: dict[str, object] = {"num_blocks": 64, "block_size": 16, "num_threads": 1, "max_num_seqs": 3}
    with LLM(case.folder, dtype="float32", speculation="prompt_lookup", **settings) as llm:
        prompts = [{"audio": audio, "language": "en"} for audio in case.audios]
        found = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [one.token_ids for one in found] == case.expected


@pytest.mark.parametrize(
    ("audio", "words"),
    [
        (np.zeros(0, np.float32), "audio has 0 samples"),
        (PackedTensors([PackedTensor("audio", "FP32", (16_000 * 36_000,), 0)]), "576000000 samples: 1 to 32000"),
        (np.array([0.1, np.nan], np.float32), "samples of nan"),
        (np.array([0, -9000], np.float32), "samples of 9000: they must lie in -1 to 1"),
        (np.zeros((2, 8), np.float32), "one FP32 tensor"),
        (np.zeros(8, np.int16), "one FP32 tensor"),
        (None, "speech model audio"),
    ],
)
def test_what_is_no_audio_is_refused_in_one_line(case: Case, audio: Array | PackedTensors | None, words: str) -> None:
    inputs = PackedTensors.of({"audio": audio}) if isinstance(audio, np.ndarray) else audio
    message = msgspec.structs.replace(case.message(case.audios[0]), inputs=inputs)
    with pytest.raises(TidewheelError) as caught:
        to_requests(message, case.info, case.config, request_ids=["a"], seed=0, now=0.0)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_formats_of_weights_and_cache(case: Case) -> None:
    def first_logprobs(**config: object) -> Array:
        with LLM(case.folder, num_blocks=64, block_size=16, num_threads=1, **config) as llm:
            prompts = [{"audio": audio, "language": "en"} for audio in case.audios]
            sampling = msgspec.structs.replace(GREEDY, max_tokens=1, logprobs=3)
            found = llm.generate(prompts, sampling, use_tqdm=False)
            return np.array([result.logprobs[0].top_logprobs for result in found])

    exact = first_logprobs(dtype="float32")
    for changed in ({"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}):
        assert np.abs(first_logprobs(**({"dtype": "float32"} | changed)) - exact).mean() < 0.3, changed


def test_slots_take_memory_before_the_cache(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = load_parts(case.config, lambda stage, fraction: None)
    assert parts.encoder is not None and parts.encoder.num_slots == parts.info.max_num_seqs == 3
    slot_bytes = parts.encoder._kv.num_bytes // 3
    assert parts.encoder.unbacked_bytes > 3 * slot_bytes
    monkeypatch.setattr(encoder_cache, "MAX_FREE_SHARE", 0.0)
    parts = load_parts(case.config, lambda stage, fraction: None)
    assert parts.encoder is not None and parts.encoder.num_slots == parts.info.max_num_seqs == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"speculation": "first_layers"}, "speculation is first_layers"),
    ],
)
def test_settings_that_speech_has_not(case: Case, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(case.folder, dtype="float32", num_threads=1, **settings)
