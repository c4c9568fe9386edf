from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tidewheel.errors import InvalidRequest
from tidewheel.grammar import Grammar
from tidewheel.parameters import Parameter, at_least, check_count, check_fields

MAX_LOGPROBS = 256  # of the setting max_logprobs
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BIAS = 100.0
MAX_SEED = 2**64 - 1
_MAX_TOKENS = ("max_new_tokens", "max_completion_tokens", "request_output_len")
_TOKEN_ID = at_least(0, "token id")
_BIAS = Parameter("bias", low=-MAX_BIAS, high=MAX_BIAS)


class TopLogprobs(NamedTuple):
    """Log-probabilities at one position."""

    logprob: float  # of the sampled token, before temperature and truncation
    rank: int  # of the sampled token, 1 = most likely; ties share the last
    top_ids: tuple[int, ...]  # most likely tokens, best first
    top_logprobs: tuple[float, ...]


class LogitBias(NamedTuple):
    """Logit biases by ascending token id."""

    token_ids: npt.NDArray[np.int32]  # [num_entries]
    amounts: npt.NDArray[np.float32]  # [num_entries]

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> "LogitBias":
        token_ids = np.fromiter(biases.keys(), dtype=np.int32, count=len(biases))
        amounts = np.fromiter(biases.values(), dtype=np.float32, count=len(biases))
        order = np.argsort(token_ids)
        return cls(token_ids[order], amounts[order])

    @classmethod
    def from_bytes(cls, token_ids: bytes, amounts: bytes) -> "LogitBias":
        """Return biases from little-endian int32 ids and float32 amounts. Raise `InvalidRequest`."""
        if len(token_ids) % 4 or len(amounts) % 4:
            raise InvalidRequest(f"logit_bias has {len(token_ids)} and {len(amounts)} bytes: each entry has four")
        bias = cls(np.frombuffer(token_ids, dtype="<i4"), np.frombuffer(amounts, dtype="<f4"))
        bias._check()
        return bias

    def to_bytes(self) -> tuple[bytes, bytes]:
        return self.token_ids.astype("<i4").tobytes(), self.amounts.astype("<f4").tobytes()

    def _check(self) -> None:
        token_ids, amounts = self
        if not 0 < len(token_ids) == len(amounts):
            raise InvalidRequest(f"logit_bias has {len(token_ids)} token ids and {len(amounts)} biases")
        check_count("logit_bias", len(token_ids), MAX_LOGIT_BIAS)
        # Ufunc reductions cost a third of array methods. NaN fails the comparison.
        is_ascending = token_ids[0] >= 0 and np.logical_and.reduce(token_ids[1:] > token_ids[:-1])
        if not is_ascending or not np.maximum.reduce(np.abs(amounts)) <= MAX_BIAS:
            _check_biases(zip(token_ids.tolist(), amounts.tolist(), strict=True))
            raise InvalidRequest("logit_bias has token ids that do not ascend")


def _check_biases(entries: Iterable[tuple[int, float]]) -> None:
    for token_id, bias in entries:
        _TOKEN_ID.check_integer("logit_bias token id", token_id)
        _BIAS.check_number(f"logit_bias[{token_id}]", bias)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request. Raise `InvalidRequest` that names field, value and limit."""

    max_tokens: Annotated[
        int | None,
        at_least(1, "most tokens of the answer; not given: the entry's `default_max_tokens`", aliases=_MAX_TOKENS),
    ] = None
    min_tokens: Annotated[int, at_least(0, "tokens before the answer may end", tensor_aliases=("min_length",))] = 0
    # Below 0.01, logits / temperature overflow.
    temperature: Annotated[
        float, Parameter("randomness of the draw; 0: greedy", low=0.01, high=100, outside=(0,))
    ] = 1.0
    top_k: Annotated[int, at_least(-1, "draw from the likeliest tokens; 0, -1: off", aliases=("runtime_top_k",))] = 0
    top_p: Annotated[float, Parameter("share of probability to draw from", ("runtime_top_p",), above=0, high=1)] = 1.0
    min_p: Annotated[float, Parameter("least probability, as a share of the likeliest", low=0, high=1)] = 0.0
    repetition_penalty: Annotated[
        float, Parameter("factor against tokens used before; 1: off", low=0.01, high=100)
    ] = 1.0
    presence_penalty: Annotated[float, Parameter("against tokens in the answer", low=-2, high=2)] = 0.0
    frequency_penalty: Annotated[float, Parameter("against a token, for each time in the answer", low=-2, high=2)] = (
        0.0
    )
    seed: Annotated[
        int | None,
        Parameter("seed of the draws; -1: a random one", tensor_aliases=("random_seed",), low=0, high=MAX_SEED),
    ] = None
    stop: Annotated[
        tuple[str, ...],
        Parameter("texts that end the answer", (), ("stop_words",), max_entries=16, max_bytes=MAX_STOP_BYTES),
    ] = ()
    stop_token_ids: Annotated[
        tuple[int, ...], at_least(0, "tokens that end the answer", max_entries=MAX_STOP_TOKEN_IDS)
    ] = ()
    include_stop_str_in_output: Annotated[bool, Parameter("return the stop text or token too")] = False
    ignore_eos: Annotated[bool, Parameter("generate on after end-of-sequence tokens")] = False
    bad_words: Annotated[
        tuple[str, ...],
        Parameter("texts that are never generated", max_entries=MAX_BAD_WORDS, max_bytes=MAX_STOP_BYTES),
    ] = ()
    logit_bias: Annotated[
        Mapping[int, float], Parameter("bias on the logits of tokens, -100 to 100 each", max_entries=MAX_LOGIT_BIAS)
    ] = {}
    allowed_token_ids: Annotated[
        tuple[int, ...], at_least(0, "the only tokens of the answer", max_entries=MAX_ALLOWED_TOKEN_IDS)
    ] = ()
    logprobs: Annotated[int | None, at_least(0, "number of likeliest tokens with log-probabilities")] = None
    prompt_logprobs: Annotated[int | None, at_least(0, "log-probabilities of the prompt's tokens")] = None
    skip_special_tokens: Annotated[bool, Parameter("leave special tokens out of the text")] = True
    truncate_prompt_tokens: Annotated[
        int | None, at_least(1, "last prompt tokens to keep; -1: those that fit", outside=(-1,))
    ] = None
    grammar: Annotated[Grammar | None, Parameter("grammar of the answer", is_tensor=False)] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            kind = type(self.grammar).__name__
            raise InvalidRequest(f"grammar must be a Grammar, such as Grammar.json_schema makes, not a {kind}")
        if self.logit_bias:
            check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
            _check_biases(self.logit_bias.items())

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
