"""What a front end may ask of the engine, and how it is told otherwise."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from support.engine.engine_clients import add_request
from support.engine.faulty_engine import prompt_bytes
from tidewheel.config import EngineConfig
from tidewheel.engine.messages import AddRequest, EngineInfo
from tidewheel.engine.requests import (
    MAX_BAD_SEQUENCES,
    MAX_STOP_IDS,
    check_request,
    to_requests,
)
from tidewheel.errors import InvalidRequest, PromptTooLarge, Unsupported
from tidewheel.lora import Lora
from tidewheel.request import Priority, Request, RequestObjective
from tidewheel.sampling import MAX_LOGIT_BIAS, LogitBias, SamplingParams

CONFIG = EngineConfig(model="m")
INFO = EngineInfo(
    pid=1, model="m", architecture="A", device="cpu", dtype="float32", vocab_size=100, max_model_len=16,
    max_num_seqs=4, max_num_batched_tokens=16, block_size=16, num_blocks=4, weights_bytes=0, activation_bytes=0,
    kv_cache_bytes=0, enable_prefix_caching=True, load_seconds=0.0,
)  # fmt: skip


def convert_all(
    sampling: SamplingParams | None = None, *, prompt: bytes | None = None, n: int = 1, **fields: object
) -> list[Request]:
    prompt = prompt_bytes(1, 2, 3) if prompt is None else prompt
    message = add_request(7, prompt, sampling or SamplingParams(), n=n, **fields)
    ids = ["r", *(f"r{index}" for index in range(1, n))]
    return to_requests(message, INFO, CONFIG, request_ids=ids, seed=5, now=time.monotonic())


def convert(sampling: SamplingParams | None = None, *, prompt: bytes | None = None, **fields: object) -> Request:
    (request,) = convert_all(sampling, prompt=prompt, **fields)
    return request


def biases(given: dict[int, float]) -> dict[str, bytes]:
    """Fields of a message."""
    return dict(zip(("bias_token_ids", "bias_amounts"), LogitBias.of(given).to_bytes(), strict=True))


def test_logprobs_up_to_the_limit_of_the_engine() -> None:
    assert convert(SamplingParams(logprobs=20)).sampling.logprobs == 20
    with pytest.raises(InvalidRequest, match=r"logprobs is 21: it must be 0 to 20 \(max_logprobs\)"):
        convert(SamplingParams(logprobs=21))
    few = msgspec.structs.replace(INFO, max_logprobs=200)
    message = AddRequest(7, prompt_bytes(1), SamplingParams(logprobs=101))
    with pytest.raises(InvalidRequest, match="it must be 0 to 100"):
        check_request(message, few)


def test_everything_arrives() -> None:
    request = convert(
        SamplingParams(max_tokens=4, seed=9),
        stop_token_ids=(2, 99),
        bad_words_ids=((1, 2), (3,)),
        priority=1,
        cache_salt="tenant",
        arrival_ns=1_500_000_000,
    )
    assert request.prompt_token_ids.tolist() == [1, 2, 3]
    assert (request.request_id, request.max_tokens, request.seed) == ("r", 4, 9)
    assert (request.stop_token_ids, request.bad_words_ids) == ((2, 99), ((1, 2), (3,)))
    assert (request.priority, request.cache_salt, request.arrival_time) == (Priority.CRITICAL, "tenant", 1.5)


def test_adapters_share_no_blocks() -> None:
    config = EngineConfig(model="m", enable_lora=True)
    seen = set()
    for version in (None, 1, 11):
        lora = None if version is None else Lora("sql", version, Path("a"))
        for salt in ("", "1:", ":", "11:x"):
            message = add_request(7, prompt_bytes(1), SamplingParams(), cache_salt=salt)
            (request,) = to_requests(message, INFO, config, request_ids=["r"], seed=5, now=0.0, lora=lora)
            assert request.lora is lora
            seen.add(request.cache_salt)
    assert len(seen) == 12


def test_how_it_is_served_arrives() -> None:
    request = convert(
        tenant="acme", deadline_ns=2_500_000_000, soft_deadline_ns=2_000_000_000, session_id="s", session_ttl_s=7.5
    )
    assert (request.tenant, request.deadline, request.soft_deadline) == ("acme", 2.5, 2.0)
    assert request.objective is None
    assert convert(tpot_ms=20).objective == RequestObjective(tpot_s=0.02)
    assert (request.session_id, request.session_ttl, request.leader) == ("s", 7.5, None)
    request = convert(session_id="s")
    assert (request.tenant, request.deadline, request.soft_deadline, request.session_ttl) == ("", None, None, 300.0)


def test_a_session_needs_prefix_caching() -> None:
    info = msgspec.structs.replace(INFO, enable_prefix_caching=False)
    message = add_request(7, prompt_bytes(1, 2, 3), SamplingParams(), session_id="s")
    with pytest.raises(InvalidRequest, match="session_id needs enable_prefix_caching, which is false"):
        check_request(message, info)


def test_biases_arrive_as_arrays() -> None:
    bias = convert(**biases({7: 1.5, 3: -100.0, 99: 100.0})).logit_bias
    assert bias is not None
    assert (bias.token_ids.dtype, bias.amounts.dtype) == (np.int32, np.float32)
    assert (bias.token_ids.tolist(), bias.amounts.tolist()) == ([3, 7, 99], [-100.0, 1.5, 100.0])
    subject = convert(SamplingParams(temperature=0.5))
    assert subject.row_sampling is subject.sampling


@pytest.mark.parametrize(
    ("ids", "amounts", "text"),
    [
        ([5, 5], [1.0, 1.0], "do not ascend"),
        ([5, 9, 7], [1.0] * 3, "do not ascend"),
        ([-1, 5], [1.0] * 2, "logit_bias token id is -1: it must be 0 to"),
        ([5, 100], [1.0] * 2, "logit_bias has token id 100 at position"),
        ([5, 6], [1.0, math.nan], r"logit_bias\[6\] is nan: it must be finite"),
        ([5, 6], [math.inf, 1.0], r"logit_bias\[5\] is inf: it must be finite"),
        ([5, 6], [1.0, 100.5], r"logit_bias\[6\] is 100.5: it must be -100 to 100"),
        ([5, 6], [1.0], "logit_bias has 2 token ids and 1 biases"),
        ([], [1.0], "logit_bias has 0 token ids and 1 biases"),
        ([5], [], "logit_bias has 1 token ids and 0 biases"),
        (range(MAX_LOGIT_BIAS + 1), [1.0] * (MAX_LOGIT_BIAS + 1), "logit_bias has 1025 entries: at most 1024"),
    ],
)
def test_biases_that_are_refused(ids: Sequence[int], amounts: list[float], text: str) -> None:
    packed = {
        "bias_token_ids": np.array(ids, dtype="<i4").tobytes(),
        "bias_amounts": np.array(amounts, dtype="<f4").tobytes(),
    }
    with pytest.raises(InvalidRequest, match=text):
        convert(**packed)
    with pytest.raises(InvalidRequest, match="bytes: each entry has four"):
        convert(**packed | {"bias_token_ids": packed["bias_token_ids"] + b"1"})


@pytest.mark.parametrize(("given", "first"), [(9, 9), (None, 5), (2**64 - 1, 2**64 - 1)])
def test_sequences_share_the_prompt_and_not_the_seed(given: int | None, first: int) -> None:
    requests = convert_all(SamplingParams(seed=given), n=3)
    assert [request.request_id for request in requests] == ["r", "r1", "r2"]
    assert [request.seed for request in requests] == [(first + index) % 2**64 for index in range(3)]
    assert [request.leader for request in requests] == [None, requests[0], requests[0]]
    assert all(request.prompt_token_ids is requests[0].prompt_token_ids for request in requests)


@pytest.mark.parametrize("n", [0, -1, 17, 10**9])
def test_how_many_sequences(n: int) -> None:
    with pytest.raises(InvalidRequest, match=f"n is {n}: it must be 1 to 16"):
        convert(n=n)


def test_what_is_left_open_is_filled_in() -> None:
    request = convert(priority=0)
    assert (request.max_tokens, request.seed, request.priority) == (13, 5, Priority.NORMAL)


def test_nobody_arrives_in_the_future() -> None:
    before = time.monotonic()
    assert before <= convert(arrival_ns=2**62).arrival_time <= time.monotonic()


def test_the_longest_prompt_leaves_one_token_of_output() -> None:
    assert convert(prompt=prompt_bytes(*[1] * 15)).max_tokens == 1
    with pytest.raises(PromptTooLarge, match=r"16 tokens.*leaves room for 15"):
        convert(prompt=prompt_bytes(*[1] * 16))


def test_embeddings_need_hidden_states() -> None:
    info = msgspec.structs.replace(INFO, is_native=False)
    with pytest.raises(Unsupported, match="embeddings of A are not offered"):
        check_request(add_request(7, prompt_bytes(1), SamplingParams(), pooling="mean"), info)


@pytest.mark.parametrize(
    ("sampling", "fields", "text"),
    [
        (None, {"prompt": b""}, "empty"),
        (None, {"prompt": prompt_bytes(1, -1)}, "token id -1 at position 1: the model's ids are 0 to 99"),
        (None, {"prompt": prompt_bytes(100)}, "token id 100 at position 0"),
        (SamplingParams(max_tokens=14), {}, "max_tokens is 14: the prompt has 3 tokens.*leaves room for 13"),
        (SamplingParams(min_tokens=14), {}, "min_tokens is 14: the prompt has 3 tokens.*leaves room for 13"),
        (SamplingParams(stop_token_ids=(100,)), {}, "stop_token_ids has token id 100"),
        (SamplingParams(prompt_logprobs=21), {}, "prompt_logprobs is 21: it must be 0 to 20"),
        (SamplingParams(allowed_token_ids=(5, 100)), {}, "allowed_token_ids has token id 100"),
        (
            SamplingParams(allowed_token_ids=(2, 5), min_tokens=1),
            {"stop_token_ids": (5, 2)},
            "allowed_token_ids holds only tokens that end the answer, and min_tokens is 1",
        ),
        (None, {"stop_token_ids": (-1,)}, "stop_token_ids has token id -1"),
        (None, {"stop_token_ids": (1,) * (MAX_STOP_IDS + 1)}, "at most 128"),
        (None, {"bad_words_ids": ((),)}, "empty token sequence"),
        (None, {"bad_words_ids": ((1, 100),)}, "bad_words has token id 100"),
        (None, {"bad_words_ids": ((1,) * 257,)}, "257 entries: at most 256"),
        (None, {"bad_words_ids": ((1,),) * (MAX_BAD_SEQUENCES + 1)}, "bad_words has 257 entries: at most 256"),
        (None, {"priority": 5}, "priority is 5"),
        (None, {"priority": -1}, "priority is -1"),
        (None, {"tenant": "x" * 129}, "tenant has 129 characters: at most 128"),
        (None, {"tenant": "a\nb"}, r"tenant holds the control character U\+000A at position 1: remove it"),
        (None, {"session_id": "x" * 257}, "session_id has 257 bytes: at most 256"),
        (None, {"session_id": "s", "session_ttl_s": 3601.0}, "session_ttl_s is 3601.*3600.*max_session_ttl_s"),
        (None, {"session_id": "s", "session_ttl_s": 0.0}, "session_ttl_s is 0: it must be above 0"),
        (None, {"cache_salt": "x" * (257)}, "cache_salt has 257 bytes"),
        (None, {"cache_salt": "é" * (129)}, "cache_salt has 258 bytes"),
    ],
)
def test_refusals_name_the_field_and_the_limit(
    sampling: SamplingParams | None, fields: dict[str, object], text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        convert(sampling, **fields)  # type: ignore[arg-type]
