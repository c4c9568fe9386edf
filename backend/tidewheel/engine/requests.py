"""From the wire to the scheduler: an `AddRequest` becomes `n` requests once everything in it was checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.engine.messages import AddRequest, EngineInfo
from tidewheel.errors import InvalidRequest, PromptTooLarge
from tidewheel.request import Priority, Request
from tidewheel.sampling import MAX_BAD_WORDS, MAX_SEED, MAX_STOP_TOKEN_IDS
from tidewheel.tenants import MAX_TENANT_CHARS

# A front end adds to what a client may send: end-of-sequence ids, and a spelling of each word after a space.
MAX_STOP_IDS = 2 * MAX_STOP_TOKEN_IDS
MAX_BAD_SEQUENCES = 4 * MAX_BAD_WORDS
MAX_BAD_SEQUENCE_TOKENS = 256
MAX_BAD_TOKENS = 4096  # of all sequences
MAX_SALT_CHARS = 256
MAX_SESSION_ID_CHARS = 256
MAX_SEQUENCES = 16


class SessionTtl(NamedTuple):
    """How long the engine keeps a session, in seconds."""

    default_s: float
    max_s: float


def to_requests(
    message: AddRequest,
    info: EngineInfo,
    session_ttl: SessionTtl,
    *,
    request_ids: Sequence[str],
    seed: int,
    now: float,
) -> list[Request]:
    """One request for each id; the first is the leader of the others, which share its prompt.

    Each sequence samples with the seed plus its index, modulo 2**64; `seed` is for messages without one. Raises
    `InvalidRequest` naming the field, the value and the limit.
    """
    prompt = _prompt(message.prompt, info)
    max_tokens = _max_tokens(message, len(prompt), info)
    message.sampling.check_vocabulary(info.vocab_size)
    _check_ids("stop_token_ids", message.stop_token_ids, info.vocab_size, MAX_STOP_IDS)
    _check_bad_words(message.bad_words_ids, info.vocab_size)
    _check_length("cache_salt", message.cache_salt, MAX_SALT_CHARS)
    _check_length("tenant", message.tenant, MAX_TENANT_CHARS)
    _check_length("session_id", message.session_id, MAX_SESSION_ID_CHARS)
    if message.session_id and not info.enable_prefix_caching:
        raise InvalidRequest("session_id needs enable_prefix_caching, which is false: leave it out")
    first_seed = seed if message.sampling.seed is None else message.sampling.seed
    ttl = _session_ttl(message, session_ttl)
    priority = _priority(message.priority)
    requests: list[Request] = []
    for index, request_id in enumerate(request_ids):
        request = Request(
            request_id,
            prompt,
            message.sampling,
            max_tokens=max_tokens,
            arrival_time=min(now, message.arrival_ns * 1e-9) if message.arrival_ns > 0 else now,
            seed=(first_seed + index) % (MAX_SEED + 1),
            priority=priority,
            stop_token_ids=message.stop_token_ids,
            bad_words_ids=message.bad_words_ids,
            cache_salt=message.cache_salt,
            tenant=message.tenant,
            deadline=_seconds(message.deadline_ns),
            soft_deadline=_seconds(message.soft_deadline_ns),
            session_id=message.session_id,
            session_ttl=ttl,
            leader=requests[0] if requests else None,
        )
        requests.append(request)
    return requests


def check_num_sequences(n: int) -> None:
    if not 1 <= n <= MAX_SEQUENCES:
        raise InvalidRequest(f"n is {n}: it must be 1 to {MAX_SEQUENCES}")


def _seconds(moment_ns: int) -> float | None:
    return moment_ns * 1e-9 if moment_ns else None


def _session_ttl(message: AddRequest, limits: SessionTtl) -> float:
    if message.session_ttl_s is None:
        return limits.default_s
    if not 0.0 < message.session_ttl_s <= limits.max_s:
        raise InvalidRequest(
            f"session_ttl_s is {message.session_ttl_s:g}: it must be above 0 and at most {limits.max_s:g} "
            "(max_session_ttl_s)"
        )
    return message.session_ttl_s


def _check_length(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(f"{name} has {len(text)} characters: at most {limit} are read")


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
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    outside = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
    raise InvalidRequest(f"{name} has token id {outside}: the model's ids are 0 to {vocab_size - 1}")


def _check_bad_words(sequences: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    if len(sequences) > MAX_BAD_SEQUENCES:
        raise InvalidRequest(
            f"bad_words has {len(sequences)} token sequences: at most {MAX_BAD_SEQUENCES} are allowed"
        )
    num_tokens = sum(map(len, sequences))
    if num_tokens > MAX_BAD_TOKENS:
        raise InvalidRequest(f"bad_words has {num_tokens} tokens in all: at most {MAX_BAD_TOKENS} are allowed")
    for sequence in sequences:
        if not sequence:
            raise InvalidRequest("bad_words holds an empty token sequence")
        _check_ids("bad_words", sequence, vocab_size, MAX_BAD_SEQUENCE_TOKENS)
