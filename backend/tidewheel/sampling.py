from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidewheel.errors import InvalidRequest
from tidewheel.grammar import Grammar

# Caps checked before allocation.
MAX_LOGPROBS = 256  # of the setting max_logprobs, which `check_request` compares
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BIAS = 100.0
MIN_TEMPERATURE = 1e-2  # below it logits / temperature overflows; 0 means greedy
MAX_TEMPERATURE = 100.0
MAX_SEED = 2**64 - 1


class TopLogprobs(NamedTuple):
    """Log-probabilities at one sampled position."""

    logprob: float  # of the sampled token, before temperature and truncation
    rank: int  # of the sampled token, 1 = most likely; ties share the last
    top_ids: tuple[int, ...]  # most likely tokens, best first
    top_logprobs: tuple[float, ...]


class LogitBias(Mapping[int, float]):
    """Biases as aligned arrays with ascending token ids."""

    __slots__ = ("amounts", "token_ids")

    def __init__(self, token_ids: npt.NDArray[np.int32], amounts: npt.NDArray[np.float32]) -> None:
        """Raise `InvalidRequest` for wrong counts, ids that do not ascend, and values out of range."""
        self.token_ids = token_ids  # [num_entries]
        self.amounts = amounts  # [num_entries]
        if not 0 < len(token_ids) == len(amounts):
            raise InvalidRequest(f"logit_bias has {len(token_ids)} token ids and {len(amounts)} biases")
        _check_count("logit_bias", len(token_ids), MAX_LOGIT_BIAS)
        # Ufunc reductions cost a third of array methods. NaN fails the comparison.
        is_ascending = token_ids[0] >= 0 and np.logical_and.reduce(token_ids[1:] > token_ids[:-1])
        if not is_ascending or not np.maximum.reduce(np.abs(amounts)) <= MAX_BIAS:
            self._refuse()

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> LogitBias:
        if isinstance(biases, LogitBias):
            return biases
        token_ids = np.fromiter(biases.keys(), dtype=np.int32, count=len(biases))
        amounts = np.fromiter(biases.values(), dtype=np.float32, count=len(biases))
        order = np.argsort(token_ids)
        return cls(token_ids[order], amounts[order])

    @classmethod
    def from_bytes(cls, token_ids: bytes, amounts: bytes) -> LogitBias:
        """Read little-endian int32 ids and float32 amounts. Raise `InvalidRequest`."""
        if len(token_ids) % 4 or len(amounts) % 4:
            raise InvalidRequest(f"logit_bias has {len(token_ids)} and {len(amounts)} bytes: each entry has four")
        return cls(np.frombuffer(token_ids, dtype="<i4"), np.frombuffer(amounts, dtype="<f4"))

    @property
    def last_token_id(self) -> int:
        return int(self.token_ids[-1])

    def __getitem__(self, token_id: int) -> float:
        index = int(np.searchsorted(self.token_ids, token_id))
        if index == len(self.token_ids) or self.token_ids[index] != token_id:
            raise KeyError(token_id)
        return float(self.amounts[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids.tolist())

    def __len__(self) -> int:
        return len(self.token_ids)

    def _refuse(self) -> None:
        before = -1
        for token_id, amount in zip(self.token_ids.tolist(), self.amounts.tolist(), strict=True):
            _check_int("logit_bias token id", token_id, 0, 2**31 - 1)
            if token_id <= before:
                problem = "twice" if token_id == before else f"after {before}: they must ascend"
                raise InvalidRequest(f"logit_bias has the token id {token_id} {problem}")
            _check_float(f"logit_bias[{token_id}]", amount, -MAX_BIAS, MAX_BIAS)
            before = token_id


def pack_biases(biases: Mapping[int, float]) -> tuple[bytes, bytes]:
    """Return arguments of `from_bytes`, empty without biases."""
    if not biases:
        return b"", b""
    bias = LogitBias.of(biases)
    return bias.token_ids.astype("<i4").tobytes(), bias.amounts.astype("<f4").tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request. Raise `InvalidRequest` naming field, value and limit."""

    max_tokens: int | None = None  # None: what fits the context
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over 1 discourages tokens of prompt and output
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    allowed_token_ids: tuple[int, ...] = ()  # no others are generated; empty: all are
    logprobs: int | None = None  # None: off; k: chosen token and k most likely
    prompt_logprobs: int | None = None  # the same of each token of the prompt but the first
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # last tokens of the prompt to keep; -1: as many as fit
    grammar: Grammar | None = None  # that the answer follows

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        _check_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise InvalidRequest(f"temperature is {self.temperature!r}: use 0 (greedy) or at least {MIN_TEMPERATURE}")
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("seed", self.seed, 0, MAX_SEED)
        _check_int("logprobs", self.logprobs, 0, 2**31 - 1)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, 2**31 - 1)
        _check_strings("stop", self.stop, MAX_STOP_STRINGS)
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        _check_count("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
        if self.truncate_prompt_tokens != -1:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31 - 1)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(self, name):
                _check_int(name, token_id, 0, 2**31 - 1)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            kind = type(self.grammar).__name__
            raise InvalidRequest(f"grammar must be a Grammar, such as Grammar.json_schema makes, not a {kind}")
        if not isinstance(self.logit_bias, LogitBias) and not _are_biases(self.logit_bias):
            for token_id, bias in self.logit_bias.items():
                _check_int("logit_bias token id", token_id, 0, 2**31 - 1)
                _check_float(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _are_biases(biases: Mapping[int, float]) -> bool:
    """Check all entries at once, twenty times as fast as singly."""
    if not biases:
        return True
    if set(map(type, biases)) != {int} or not set(map(type, biases.values())) <= {int, float}:
        return False
    low, high = min(biases.values()), max(biases.values())
    has_nan = any(map(math.isnan, biases.values()))
    return min(biases) >= 0 and max(biases) < 2**31 and low >= -MAX_BIAS and high <= MAX_BIAS and not has_nan


def _check_int(name: str, value: int | None, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}: it must be {low} to {high}")


def _check_float(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, not {value!r}")
    if not -math.inf < value < math.inf:  # unlike `isfinite`, for integers of any size
        raise InvalidRequest(f"{name} is {value!r}: it must be finite")
    if value < low or value > high or (open_low and value == low):
        bound = f"above {low} and at most {high}" if open_low else f"{low} to {high}"
        raise InvalidRequest(f"{name} is {value!r}: it must be {bound}")


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} entries: at most {limit} are allowed")


def _check_strings(name: str, values: tuple[str, ...], limit: int) -> None:
    _check_count(name, len(values), limit)
    for value in values:
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} must hold strings, not {value!r}")
        if not value:
            raise InvalidRequest(f"{name} holds an empty string")
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > MAX_STOP_BYTES:
            raise InvalidRequest(f"{name} holds a string of {size} bytes: at most {MAX_STOP_BYTES} are allowed")
