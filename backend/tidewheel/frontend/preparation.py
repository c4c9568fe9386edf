from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tidewheel.batch import Int32Array
from tidewheel.config import setting_names
from tidewheel.engine.messages import AddRequest, CloseSession, EngineInfo
from tidewheel.engine.requests import check_prompt_length, check_request
from tidewheel.errors import InvalidRequest, Unsupported
from tidewheel.frontend.coercion import check_size, show, to_text
from tidewheel.frontend.conversation import parse_conversation
from tidewheel.frontend.grammar_parameters import with_grammar
from tidewheel.frontend.interface import INPUT_TENSOR, GenerateRequest, Generation, ParameterSource
from tidewheel.frontend.known_parameters import ABSENT, ALIASES, COERCIONS, OPTIONS, SUGGESTED
from tidewheel.frontend.model_files import GenerationDefaults
from tidewheel.frontend.output import Outputs, OutputStream
from tidewheel.frontend.prompt_process import PromptEncoder
from tidewheel.frontend.request_options import RequestOptions
from tidewheel.frontend.text import StopStrings
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.frontend.word_biases import with_token_biases
from tidewheel.grammar import Grammar
from tidewheel.request import Priority
from tidewheel.runner.grammar_compiler import to_source
from tidewheel.sampling import SamplingParams, pack_biases
from tidewheel.settings import nearest
from tidewheel.tenants import TenantLimits, limits_of

MAX_ANSWER_LOGPROBS = 1 << 20  # some 70 bytes each
_MAX_KEY_CHARS = 64  # longer keys get no suggestion
_URGENCY_KEYS = ("priority", "tenant", "deadline_ms", "soft_deadline_ms")
_CLOSING_KEYS = frozenset({"close_session", "session_id", "tenant"})


class ParsedParameters(NamedTuple):
    sampling: SamplingParams
    options: RequestOptions


class Urgency(NamedTuple):
    """Place in queues. Deadline 0: none."""

    priority: int = Priority.NORMAL
    deadline_ns: int = 0
    soft_deadline_ns: int = 0


class _Given(NamedTuple):
    value: object
    label: str  # key and carrier, for errors


class Prepared(NamedTuple):
    message: AddRequest | CloseSession
    outputs: Outputs | None  # None: nothing is generated
    has_stop_strings: bool


class Preparer:
    """Maker of messages and outputs, thread-safe. Without a tokenizer, outputs have no text."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults | None = None,
        encoder: Tokenizer | PromptEncoder | None = None,
        compilable: Callable[[Grammar], str] = to_source,
    ) -> None:
        """`encoder` makes tokens of `bad_words`; without one, the tokenizer does. `compilable` tries grammars out."""
        self._compilable = compilable
        self._info = info
        self._tokenizer = tokenizer
        self._encoder = encoder or tokenizer
        self.defaults = defaults or GenerationDefaults.load(Path(info.model))
        eos = self.defaults.eos_token_ids | (frozenset() if tokenizer is None else tokenizer.eos_token_ids)
        # Folders may name ids that the model cannot output.
        self._eos_token_ids = tuple(sorted(token_id for token_id in eos if token_id < info.vocab_size))

    def prepare(self, key: int, given: Generation, arrival_ns: int, timeout_us: int = 0) -> Prepared:
        """Raise `InvalidRequest`."""
        sampling = given.sampling
        grammar = sampling.grammar
        bias_token_ids, bias_amounts = pack_biases(sampling.logit_bias)
        message = AddRequest(
            key=key,
            prompt=given.prompt_ids.astype("<i4").tobytes(),
            sampling=dataclasses.replace(sampling, stop=(), bad_words=(), logit_bias={}, grammar=None),
            stop_token_ids=self._stop_token_ids(sampling),
            bad_words_ids=self._bad_words_ids(sampling),
            bias_token_ids=bias_token_ids,
            bias_amounts=bias_amounts,
            grammar="" if grammar is None else self._compilable(grammar),
            grammar_name="" if grammar is None else grammar.name,
            end_token_ids=self._end_token_ids(sampling),
            **given.options.to_wire(arrival_ns, timeout_us),
        )
        check_request(message, self._info, prompt_name=given.prompt_name)
        return Prepared(message, Outputs(message, lambda: self._open_streams(given)), bool(sampling.stop))

    def _stop_token_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        # A grammar may only be able to end.
        eos = () if sampling.ignore_eos and sampling.grammar is None else self._eos_token_ids
        return tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))

    def _end_token_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        if sampling.grammar is None:
            return ()
        special = frozenset() if self._tokenizer is None else self._tokenizer.special_ids
        return tuple(dict.fromkeys((*self._eos_token_ids, *(t for t in sampling.stop_token_ids if t in special))))

    def _bad_words_ids(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if self._encoder is None:
            return ()
        vocab_size = self._info.vocab_size
        return tuple(ids for word in sampling.bad_words for ids in phrase_ids(word, self._encoder, vocab_size))

    def _open_streams(self, given: Generation) -> list[OutputStream]:
        stop = StopStrings(given.sampling.stop)
        return [OutputStream(self._tokenizer, given, stop) for _ in range(given.options.n)]


class RequestReader:
    """Reader of client requests, thread-safe."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        *,
        max_prompt_bytes: int,
        default_max_tokens: int | Literal["context"],
        defaults: GenerationDefaults | None = None,
    ) -> None:
        """Without `defaults`, requests sample as the model says."""
        self._info = info
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._preparer = Preparer(info, tokenizer, defaults, encoder, encoder.compilable)
        self._max_prompt_bytes = max_prompt_bytes
        self._default_max_tokens = info.max_num_tokens if default_max_tokens == "context" else default_max_tokens

    def close(self) -> None:
        self._encoder.close()

    def read(self, key: int, request: GenerateRequest, arrival_ns: int) -> Prepared:
        """Raise `InvalidRequest` or `Unsupported`."""
        parameters = with_token_biases(request.parameters, self._encode_word)
        sampling, options = parse_parameters(parameters, self._preparer.defaults.sampling)
        if options.close_session:
            return _close_session(key, request, options)
        name, text, prompt_ids = self._read_prompt(request)
        sampling = self._fit(sampling, len(prompt_ids))
        echo = request.echo and not request.stream
        given = Generation(prompt_ids, sampling, options, name, text, echo)
        prepared = self._preparer.prepare(key, given, arrival_ns, request.timeout_us)
        _check_answer(sampling, options.n)  # last: its limit concerns values that are right alone
        return prepared

    def _read_prompt(self, request: GenerateRequest) -> tuple[str, str | None, Int32Array]:
        """Return field, any text, and token ids."""
        forms = {"text_input": request.text, "input_ids": request.input_ids, "messages": request.messages}
        given = [name for name, value in forms.items() if value is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"give one of text_input, input_ids and messages, not {' and '.join(given) or 'none'}"
            )
        name = given[0]
        check_size(name, request.prompt_bytes, self._max_prompt_bytes, "max_prompt_bytes")
        if request.input_ids is not None:
            return name, None, request.input_ids
        if request.messages is None:
            text = to_text(name, request.text)
        else:
            text = self._encoder.render(parse_conversation(request.messages))
        return name, text, self._encode(name, text, add_special_tokens=request.messages is None)

    def _fit(self, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Set `max_tokens` if it is not given, and cut it to the context. Leave refusals to `check_request`."""
        room = self._info.max_num_tokens - num_prompt_tokens
        if room < max(sampling.min_tokens, 1):
            return dataclasses.replace(sampling, max_tokens=None)
        if sampling.max_tokens is None and sampling.min_tokens > self._default_max_tokens:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}, more than {self._default_max_tokens}, the default of "
                "max_tokens (default_max_tokens): set max_tokens too"
            )
        return dataclasses.replace(sampling, max_tokens=min(sampling.max_tokens or self._default_max_tokens, room))

    def _encode_word(self, word: str) -> Int32Array:
        return self._encoder.encode(word, add_special_tokens=False)

    def _encode(self, name: str, text: str, *, add_special_tokens: bool) -> Int32Array:
        if not text:
            raise InvalidRequest(f"{name} is empty: give at least one character")
        if self._tokenizer.max_token_bytes is not None:
            # Tokenisation can take seconds.
            least = -(-len(text.encode("utf-8")) // self._tokenizer.max_token_bytes)
            check_prompt_length(name, least, self._info, qualifier=" or more")
        return self._encoder.encode(text, add_special_tokens=add_special_tokens)


def _check_answer(sampling: SamplingParams, n: int) -> None:
    """Bound the memory of an answer, which its client may not read."""
    num_tokens = n * (sampling.max_tokens or 0)
    if sampling.logprobs is not None and (sampling.logprobs + 1) * num_tokens > MAX_ANSWER_LOGPROBS:
        raise InvalidRequest(
            f"logprobs is {sampling.logprobs}, and n x max_tokens {num_tokens}: an answer has room for "
            f"{MAX_ANSWER_LOGPROBS}, one more than logprobs for each token; lower logprobs, n or max_tokens"
        )


def _close_session(key: int, request: GenerateRequest, options: RequestOptions) -> Prepared:
    if request.text or request.messages is not None or request.input_ids is not None:
        raise InvalidRequest("close_session is true, and there is a prompt: it takes none, or an empty text_input")
    return Prepared(CloseSession(key, options.tenant, options.session_id), None, False)


def phrase_ids(phrase: str, encoder: Tokenizer | PromptEncoder, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return its tokens at the start of a text and after a space."""
    bare = phrase.lstrip() or phrase
    spellings = [encoder.encode(text, add_special_tokens=False).tolist() for text in (bare, f" {bare}")]
    return tuple(dict.fromkeys(tuple(ids) for ids in spellings if ids and max(ids) < vocab_size))


def parse_parameters(
    sources: Iterable[ParameterSource], defaults: Mapping[str, Any] | None = None
) -> ParsedParameters:
    """Merge all carriers over `defaults`. Null counts as not given. Raise `InvalidRequest` or `Unsupported`."""
    given = _collect(with_grammar(tuple(sources)))
    options = _options(given)
    given.pop("pad_id", None)
    end_id = given.pop("end_id", None)
    values: dict[str, Any] = {**(defaults or {}), **{key: entry.value for key, entry in given.items()}}
    if end_id is not None:
        values["stop_token_ids"] = tuple(dict.fromkeys((*values.get("stop_token_ids", ()), end_id.value)))
    return ParsedParameters(SamplingParams(**values), options)


def read_urgency(request: GenerateRequest, arrival_ns: int, tenants: Mapping[str, TenantLimits]) -> Urgency:
    """Read what queues need. Ignore malformed values, which `parse_parameters` refuses later."""
    sources = (
        ParameterSource(origin=source.origin, values={key: source.values.get(key) for key in _URGENCY_KEYS})
        for source in request.parameters
    )
    try:
        options = _options(_collect(sources))
    except InvalidRequest:
        options = RequestOptions()
    wire = options.to_wire(arrival_ns, request.timeout_us)
    priority = limits_of(tenants, options.tenant).granted(options.priority)
    return Urgency(priority, wire["deadline_ns"], wire["soft_deadline_ns"])


def _collect(sources: Iterable[ParameterSource]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for source in sources:
        for key, raw in source.values.items():
            if raw is None or _is_neutral(key, raw):
                continue
            name = ALIASES.get(key, key)
            value = COERCIONS[name](key, raw)
            if source.origin == INPUT_TENSOR and value in (math.inf, -math.inf):
                raise InvalidRequest(
                    f"{key} is {value}: it must be finite; its tensor is FP32, which holds numbers up to 3.4e+38"
                )
            if value == () or value == {}:
                continue
            entry = _Given(value, f"{key} in {source.origin}")
            earlier = given.setdefault(name, entry)
            if earlier is not entry and earlier.value != value:
                raise InvalidRequest(
                    f"{earlier.label} is {show(earlier.value)} and {entry.label} is {show(value)}: give one value"
                )
    return given


def _is_neutral(key: str, raw: object) -> bool:
    """Return whether nothing is requested. Raise if a feature is absent or unknown."""
    if key in COERCIONS or key in ALIASES:
        return False
    feature = ABSENT.get(key)
    if feature is None:
        raise InvalidRequest(_unknown(key))
    if not feature.is_neutral(raw):
        raise Unsupported(feature.reason if feature.is_whole else f"{key} is {show(raw)}: {feature.reason}")
    return True


def _unknown(key: str) -> str:
    if key in setting_names():
        return f"unknown parameter {key!r}: it is a setting of the entry, not of a request"
    near = nearest(key, SUGGESTED) if len(key) <= _MAX_KEY_CHARS else ""
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(sorted(COERCIONS))}"
    return f"unknown parameter {show(key)}: {hint}"


def _options(given: dict[str, _Given]) -> RequestOptions:
    """Take the options out of `given`."""
    closing, others = given.get("close_session"), sorted(given.keys() - _CLOSING_KEYS)
    if closing is not None and closing.value and others:
        raise InvalidRequest(f"close_session is true: it goes with session_id and tenant, not with {others[0]}")
    values = {key: given.pop(key).value for key in OPTIONS.keys() & given.keys()}
    options = RequestOptions(**values)  # type: ignore[arg-type]
    best_of = given.pop("best_of", None)
    if best_of is not None and best_of.value != options.n:
        raise Unsupported(f"best_of is {best_of.value} and n is {options.n}: all sequences are returned, none chosen")
    return options
