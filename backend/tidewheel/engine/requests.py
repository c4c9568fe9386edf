"""From the wire to the scheduler: an `AddRequest` becomes a `Request` once everything in it was checked."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.engine.messages import AddRequest, EngineInfo
from tidewheel.errors import InvalidRequest, PromptTooLarge
from tidewheel.request import Priority, Request
from tidewheel.sampling import MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS

# A front end adds to what a client may send: end-of-sequence ids, and a spelling of each word after a space.
MAX_STOP_IDS = 2 * MAX_STOP_TOKEN_IDS
MAX_BAD_SEQUENCES = 4 * MAX_BAD_WORDS
MAX_BAD_SEQUENCE_TOKENS = 256
MAX_SALT_CHARS = 256


def to_request(message: AddRequest, info: EngineInfo, *, request_id: str, seed: int, now: float) -> Request:
    """Raises `InvalidRequest` naming the field, the value and the limit. `seed` is for requests without one."""
    prompt = _prompt(message.prompt, info)
    max_tokens = _max_tokens(message, len(prompt), info)
    message.sampling.check_vocabulary(info.vocab_size)
    _check_ids("stop_token_ids", message.stop_token_ids, info.vocab_size, MAX_STOP_IDS)
    _check_bad_words(message.bad_words_ids, info.vocab_size)
    if len(message.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(message.cache_salt)} characters: at most {MAX_SALT_CHARS} are read"
        )
    return Request(
        request_id,
        prompt,
        message.sampling,
        max_tokens=max_tokens,
        arrival_time=min(now, message.arrival_ns * 1e-9) if message.arrival_ns > 0 else now,
        seed=seed if message.sampling.seed is None else message.sampling.seed,
        priority=_priority(message.priority),
        stop_token_ids=message.stop_token_ids,
        bad_words_ids=message.bad_words_ids,
        cache_salt=message.cache_salt,
    )


def _prompt(raw: bytes, info: EngineInfo) -> Int32Array:
    if not raw:
        raise InvalidRequest("the prompt is empty: at least one token is needed")
    if len(raw) % 4:
        raise InvalidRequest(f"the prompt has {len(raw)} bytes: int32 token ids have four each")
    if len(raw) // 4 >= info.max_model_len:
        raise PromptTooLarge(
            f"the prompt has {len(raw) // 4} tokens: with one token of output the context of {info.max_model_len} "
            f"leaves room for {info.max_model_len - 1}"
        )
    prompt = np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False)
    outside = (prompt < 0) | (prompt >= info.vocab_size)
    if outside.any():
        position = int(np.argmax(outside))
        raise InvalidRequest(
            f"input_ids has token id {prompt[position]} at position {position}: "
            f"the model's ids are 0 to {info.vocab_size - 1}"
        )
    return prompt


def _max_tokens(message: AddRequest, num_prompt_tokens: int, info: EngineInfo) -> int:
    room = info.max_model_len - num_prompt_tokens
    max_tokens = room if message.sampling.max_tokens is None else message.sampling.max_tokens
    if max_tokens > room:
        raise InvalidRequest(
            f"max_tokens is {max_tokens}: the prompt has {num_prompt_tokens} tokens, so the context of "
            f"{info.max_model_len} leaves room for {room}"
        )
    if message.sampling.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {message.sampling.min_tokens}: at most {max_tokens} fit")
    return max_tokens


def _priority(value: int) -> Priority:
    try:
        return Priority.from_wire(value)
    except ValueError:
        raise InvalidRequest(f"priority is {value}: it must be 0 (default) or 1 (first) to 4 (last)") from None


def _check_ids(name: str, ids: Iterable[int], vocab_size: int, limit: int) -> None:
    ids = tuple(ids)
    if len(ids) > limit:
        raise InvalidRequest(f"{name} has {len(ids)} entries: at most {limit} are allowed")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name} has token id {token_id}: the model's ids are 0 to {vocab_size - 1}")


def _check_bad_words(sequences: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    if len(sequences) > MAX_BAD_SEQUENCES:
        raise InvalidRequest(
            f"bad_words has {len(sequences)} token sequences: at most {MAX_BAD_SEQUENCES} are allowed"
        )
    for sequence in sequences:
        if not sequence:
            raise InvalidRequest("bad_words holds an empty token sequence")
        _check_ids("bad_words", sequence, vocab_size, MAX_BAD_SEQUENCE_TOKENS)
