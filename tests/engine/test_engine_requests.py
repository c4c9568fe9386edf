"""What a front end may ask of the engine, and how it is told otherwise."""

from __future__ import annotations

import time

import pytest

from support.faulty_engine import prompt_bytes
from tidewheel.engine.messages import AddRequest, EngineInfo
from tidewheel.engine.requests import MAX_BAD_SEQUENCES, MAX_SALT_CHARS, MAX_STOP_IDS, to_request
from tidewheel.errors import InvalidRequest, PromptTooLarge
from tidewheel.request import Priority, Request
from tidewheel.sampling import SamplingParams

INFO = EngineInfo(
    pid=1, model="m", architecture="A", device="cpu", dtype="float32", vocab_size=100, max_model_len=16,
    max_num_seqs=4, max_num_batched_tokens=16, block_size=16, num_blocks=4, weights_bytes=0, activation_bytes=0,
    kv_cache_bytes=0, enable_prefix_caching=True, load_seconds=0.0,
)  # fmt: skip


def convert(sampling: SamplingParams | None = None, *, prompt: bytes | None = None, **fields: object) -> Request:
    prompt = prompt_bytes(1, 2, 3) if prompt is None else prompt
    message = AddRequest(7, prompt, sampling or SamplingParams(), **fields)  # type: ignore[arg-type]
    return to_request(message, INFO, request_id="r", seed=5, now=time.monotonic())


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


@pytest.mark.parametrize(
    ("sampling", "fields", "text"),
    [
        (None, {"prompt": b""}, "empty"),
        (None, {"prompt": b"123"}, "3 bytes"),
        (None, {"prompt": prompt_bytes(1, -1)}, "token id -1 at position 1: the model's ids are 0 to 99"),
        (None, {"prompt": prompt_bytes(100)}, "token id 100 at position 0"),
        (SamplingParams(max_tokens=14), {}, "max_tokens is 14: the prompt has 3 tokens.*leaves room for 13"),
        (SamplingParams(min_tokens=14), {}, "min_tokens is 14: at most 13 fit"),
        (SamplingParams(stop_token_ids=(100,)), {}, "stop_token_ids has token id 100"),
        (SamplingParams(logit_bias={100: 1.0}), {}, "logit_bias has token id 100"),
        (None, {"stop_token_ids": (-1,)}, "stop_token_ids has token id -1"),
        (None, {"stop_token_ids": (1,) * (MAX_STOP_IDS + 1)}, "at most 128"),
        (None, {"bad_words_ids": ((),)}, "empty token sequence"),
        (None, {"bad_words_ids": ((1, 100),)}, "bad_words has token id 100"),
        (None, {"bad_words_ids": ((1,) * 257,)}, "257 entries: at most 256"),
        (None, {"bad_words_ids": ((1,),) * (MAX_BAD_SEQUENCES + 1)}, "257 token sequences: at most 256"),
        (None, {"priority": 5}, "priority is 5"),
        (None, {"priority": -1}, "priority is -1"),
        (None, {"cache_salt": "x" * (MAX_SALT_CHARS + 1)}, "cache_salt has 257 characters"),
    ],
)
def test_refusals_name_the_field_and_the_limit(
    sampling: SamplingParams | None, fields: dict[str, object], text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        convert(sampling, **fields)  # type: ignore[arg-type]
