import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tidewheel.audio_file import SAMPLES_PER_POSITION, SAMPLING_RATE
from tidewheel.batch import Int32Array
from tidewheel.config import EngineConfig
from tidewheel.engine.messages import AddRequest, EngineInfo
from tidewheel.errors import InvalidRequest, PromptTooLarge, Unsupported
from tidewheel.grammar import RowGrammar, TokenGrammar
from tidewheel.lora import Lora
from tidewheel.one_shot.shared_tensors import PackedTensors
from tidewheel.one_shot.signature import Arrays, StepOptions
from tidewheel.parameters import check_count
from tidewheel.request import Request
from tidewheel.request_options import RequestOptions
from tidewheel.sampling import MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORDS, MAX_SEED, MAX_STOP_TOKEN_IDS, LogitBias
from tidewheel.scheduler.admission import check_lengths

# A front end adds ids to both.
MAX_STOP_IDS = 2 * MAX_STOP_TOKEN_IDS
MAX_BAD_SEQUENCES = 4 * MAX_BAD_WORDS
MAX_BAD_SEQUENCE_TOKENS = 256
MAX_BAD_TOKENS = 4096
MAX_SAMPLE = 4.0  # of audio; resampling may pass 1 a little
MAX_PROMPT_LOGPROBS = 1 << 17  # a message of some 2 MB, between two steps


class CheckedRequest(NamedTuple):
    prompt: Int32Array  # [num_prompt_tokens]
    logit_bias: LogitBias | None
    max_tokens: int
    step_options: StepOptions | None


def to_requests(
    message: AddRequest,
    info: EngineInfo,
    config: EngineConfig,
    *,
    request_ids: Sequence[str],
    seed: int,
    now: float,
    grammar: TokenGrammar | None = None,
    lora: Lora | None = None,
) -> list[Request]:
    """Check a message; return one request per id. Request i has the seed plus i, modulo 2**64.

    The first is the `leader` of the rest. `seed`: for messages without a seed. `grammar`, `lora`: the message's.
    Raise `InvalidRequest` or `Unsupported`.
    """
    checked = check_request(message, info)
    inputs, bucket = _inputs(message, info, is_remote=config.is_remote)
    first_seed = seed if message.sampling.seed is None else message.sampling.seed
    options = message.options
    salt = options.cache_salt
    if config.enable_lora:  # before a client's salt, which may be any text
        salt = f"{0 if lora is None else lora.version}:{salt}"
    if info.max_audio_samples and inputs is not None:
        salt += "\0" + hashlib.blake2b(inputs["audio"].tobytes(), digest_size=16).hexdigest()
    ttl = _session_ttl(options, config)
    requests: list[Request] = []
    for index, request_id in enumerate(request_ids):
        request = Request(
            request_id,
            checked.prompt,
            message.sampling,
            max_tokens=checked.max_tokens,
            arrival_time=min(now, message.arrival_ns * 1e-9) if message.arrival_ns > 0 else now,
            seed=(first_seed + index) % (MAX_SEED + 1),
            priority=options.priority,
            stop_token_ids=message.stop_token_ids,
            bad_words_ids=message.bad_words_ids,
            logit_bias=checked.logit_bias,
            grammar=None if grammar is None else RowGrammar(grammar, message.end_token_ids),
            cache_salt=salt,
            lora=lora,
            pooling=message.pooling,
            tenant=options.tenant,
            deadline=_seconds(message.deadline_ns),
            soft_deadline=_seconds(message.soft_deadline_ns),
            objective=options.objective,
            session_id=options.session_id,
            session_ttl=ttl,
            bucket=bucket if checked.step_options is None else checked.step_options.size,
            inputs=inputs,
            step_options=checked.step_options,
            encoder_tokens=info.max_audio_samples // SAMPLES_PER_POSITION,
            leader=requests[0] if requests else None,
        )
        requests.append(request)
    return requests


def check_request(message: AddRequest, info: EngineInfo, *, prompt_name: str = "input_ids") -> CheckedRequest:
    """Raise `InvalidRequest` or `Unsupported`; texts call the prompt `prompt_name`."""
    sampling = message.sampling
    step_options = None if info.offer is None else info.offer.completed(message.step_options or StepOptions())
    _check_inputs(message, info, 1 if step_options is None else step_options.steps)
    limit = info.max_num_tokens
    is_text = info.signature is None
    prompt = _prompt(prompt_name, message.prompt, info) if is_text else np.frombuffer(message.prompt, np.int32)
    max_tokens = limit - len(prompt) if sampling.max_tokens is None else sampling.max_tokens
    check_lengths(len(prompt), max_tokens, sampling.min_tokens, limit)
    for ids in (message.stop_token_ids, sampling.stop_token_ids):
        _check_ids("stop_token_ids", ids, info, MAX_STOP_IDS)
    _check_bad_words(message.bad_words_ids, info)
    _check_allowed(message, info)
    _check_grammar(message)
    _check_logprobs(message, info, len(prompt))
    if message.pooling and not info.is_native:
        raise Unsupported(f"embeddings of {info.architecture} are not offered: only native decoders have them")
    if message.options.session_id and not info.enable_prefix_caching:
        raise InvalidRequest("session_id needs enable_prefix_caching, which is false: leave it out")
    return CheckedRequest(prompt, _logit_bias(message, info), max_tokens, step_options)


def _check_inputs(message: AddRequest, info: EngineInfo, steps: int | None) -> None:
    takes_tensors = info.signature is not None or info.max_audio_samples > 0
    if takes_tensors != (message.inputs is not None):
        raise InvalidRequest("a text model takes a prompt, a speech model audio, and a one-shot model tensors")
    if message.inputs is None:
        return
    if info.signature is None:
        _check_audio(message.inputs, info.max_audio_samples)
        return
    tensors = tuple((each.name, each.dtype, each.shape) for each in message.inputs.tensors)
    items = info.signature.check(tensors, info.max_num_batched_tokens)
    if message.prompt != bytes(4 * items) or message.sampling.max_tokens != steps:
        raise InvalidRequest(f"a request of {items} items has a prompt of as many zeros, and max_tokens {steps}")


def _inputs(message: AddRequest, info: EngineInfo, *, is_remote: bool) -> tuple[Arrays | None, str]:
    if message.inputs is None:
        return None, ""
    if info.signature is None:
        largest = float(np.abs(message.inputs.arrays["audio"]).max())
        if not largest <= MAX_SAMPLE:  # NaN too
            raise InvalidRequest(f"audio has samples of {largest:g}: they must lie in -1 to 1")
        return message.inputs.arrays, ""
    if is_remote:
        shapes = {each.name: each for each in message.inputs.tensors}
        return None, info.signature.bucket(shapes, with_values=False) if info.signature.is_batched else "-"
    arrays = message.inputs.arrays
    return arrays, info.signature.bucket(arrays)


def _check_audio(inputs: PackedTensors, limit: int) -> None:
    shapes = [(each.name, each.dtype, len(each.shape)) for each in inputs.tensors]
    if shapes != [("audio", "FP32", 1)]:
        raise InvalidRequest(f"audio is {shapes}: it must be one FP32 tensor [num_samples] of that name")
    count = inputs.tensors[0].shape[0]
    if not 1 <= count <= limit:
        raise InvalidRequest(
            f"audio has {count} samples: 1 to {limit} are allowed, {limit / SAMPLING_RATE:g} s at 16 kHz"
        )


def check_prompt_length(name: str, num_tokens: int, info: EngineInfo, *, qualifier: str = "") -> None:
    """Raise `PromptTooLarge` if the context leaves no token for output."""
    if num_tokens >= info.max_num_tokens:
        raise PromptTooLarge(
            f"{name} has {num_tokens} tokens{qualifier}: with one token of output the context of "
            f"{info.max_num_tokens} leaves room for {info.max_num_tokens - 1}"
        )


def check_token_ids(name: str, token_ids: npt.NDArray[Any], info: EngineInfo) -> None:
    """Raise `InvalidRequest` for ids outside the vocabulary."""
    outside = (token_ids < 0) | (token_ids >= info.vocab_size)
    if outside.any():
        position = int(np.argmax(outside))
        raise InvalidRequest(
            f"{name} has token id {token_ids[position]} at position {position}: "
            f"the model's ids are 0 to {info.vocab_size - 1}"
        )


def _seconds(moment_ns: int) -> float | None:
    return moment_ns * 1e-9 if moment_ns else None


def _session_ttl(options: RequestOptions, config: EngineConfig) -> float:
    ttl, limit = options.session_ttl_s, config.max_session_ttl_s
    if ttl is None:
        return config.session_ttl_s
    if not 0.0 < ttl <= limit:
        raise InvalidRequest(
            f"session_ttl_s is {ttl:.12g}: it must be above 0 and at most {limit:.12g} (max_session_ttl_s)"
        )
    return ttl


def _prompt(name: str, raw: bytes, info: EngineInfo) -> Int32Array:
    if not raw:
        raise InvalidRequest(f"{name} is empty, it has no tokens: give at least one")
    check_prompt_length(name, len(raw) // 4, info)
    prompt = np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False)
    check_token_ids(name, prompt, info)
    return prompt


def _logit_bias(message: AddRequest, info: EngineInfo) -> LogitBias | None:
    if not message.bias_token_ids and not message.bias_amounts:
        return None
    bias = LogitBias.from_bytes(message.bias_token_ids, message.bias_amounts)
    check_token_ids("logit_bias", bias.token_ids, info)
    return bias


def _check_ids(name: str, ids: Sequence[int], info: EngineInfo, limit: int) -> None:
    if ids:
        check_count(name, len(ids), limit)
        check_token_ids(name, np.asarray(ids), info)


def _check_grammar(message: AddRequest) -> None:
    if message.grammar and not (message.end_token_ids and set(message.end_token_ids) <= set(message.stop_token_ids)):
        raise InvalidRequest(
            f"{message.grammar_name} needs a token that ends the answer, and the model names none: give a special "
            "token in stop_token_ids"
        )


def _check_logprobs(message: AddRequest, info: EngineInfo, num_prompt_tokens: int) -> None:
    sampling, limit = message.sampling, min(info.max_logprobs, info.vocab_size)
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if (count or 0) > limit:
            raise InvalidRequest(f"{name} is {count}: it must be 0 to {limit} (max_logprobs)")
    asked = sampling.prompt_logprobs
    if asked is not None and (asked + 1) * num_prompt_tokens > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs is {asked}, and the prompt has {num_prompt_tokens} tokens: an answer has room for "
            f"{MAX_PROMPT_LOGPROBS}, one more than prompt_logprobs for each token; lower it, or send a shorter prompt"
        )


def _check_allowed(message: AddRequest, info: EngineInfo) -> None:
    allowed, min_tokens = message.sampling.allowed_token_ids, message.sampling.min_tokens
    _check_ids("allowed_token_ids", allowed, info, MAX_ALLOWED_TOKEN_IDS)
    if allowed and min_tokens and not set(allowed).difference(message.stop_token_ids):
        raise InvalidRequest(
            f"allowed_token_ids holds only tokens that end the answer, and min_tokens is {min_tokens}: allow others"
        )


def _check_bad_words(sequences: tuple[tuple[int, ...], ...], info: EngineInfo) -> None:
    check_count("bad_words", len(sequences), MAX_BAD_SEQUENCES)
    num_tokens = sum(map(len, sequences))
    if num_tokens > MAX_BAD_TOKENS:
        raise InvalidRequest(f"bad_words has {num_tokens} tokens in all: at most {MAX_BAD_TOKENS} are allowed")
    for sequence in sequences:
        if not sequence:
            raise InvalidRequest("bad_words holds an empty token sequence")
        _check_ids("bad_words", sequence, info, MAX_BAD_SEQUENCE_TOKENS)
