from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tidewheel.batch import Int32Array
from tidewheel.config import setting_names
from tidewheel.engine.messages import MAX_REQUEST_ID_CHARS, AddRequest, CloseSession, EngineInfo
from tidewheel.engine.requests import check_request
from tidewheel.errors import InvalidRequest, Unsupported
from tidewheel.frontend.coercion import show
from tidewheel.frontend.grammar_parameters import with_grammar
from tidewheel.frontend.interface import INPUT_TENSOR, GenerateRequest, Generation, ParameterSource
from tidewheel.frontend.known_parameters import ABSENT, ALIASES, COERCIONS, OPTIONS, PROMPT_OPTIONS, SUGGESTED
from tidewheel.frontend.model_files import GenerationDefaults
from tidewheel.frontend.output import EmbeddingStream, Outputs, OutputStream, PromptStream
from tidewheel.frontend.prompt_options import PromptOptions
from tidewheel.frontend.prompt_process import PromptEncoder
from tidewheel.frontend.request_options import RequestOptions
from tidewheel.frontend.text import StopStrings
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.grammar import Grammar
from tidewheel.request import Priority
from tidewheel.runner.grammar_compiler import to_source
from tidewheel.sampling import SamplingParams, pack_biases
from tidewheel.settings import nearest
from tidewheel.tenants import TenantLimits, limits_of

_MAX_KEY_CHARS = 64  # longer keys get no suggestion
_URGENCY_KEYS = ("priority", "tenant", "deadline_ms", "soft_deadline_ms", "session_id")
_CLOSING_KEYS = frozenset({"close_session", "session_id", "tenant"})
_TASK_KEYS = frozenset({*PROMPT_OPTIONS, *_URGENCY_KEYS}) - {"echo", "session_id"}  # of the tokenizer's tasks
_EMBEDDING_KEYS = frozenset({"cache_salt", "truncate_prompt_tokens"})


class ParsedParameters(NamedTuple):
    sampling: SamplingParams
    options: RequestOptions
    prompt: PromptOptions = PromptOptions()
    is_scoring: bool = False  # nothing is generated


class Urgency(NamedTuple):
    """Place in queues, and what else is known before the prompt is read. Deadline 0: none."""

    priority: int = Priority.NORMAL
    deadline_ns: int = 0
    soft_deadline_ns: int = 0
    tenant: str = ""
    has_session: bool = False


class _Given(NamedTuple):
    value: object
    label: str  # key and carrier, for errors


class Prepared(NamedTuple):
    message: AddRequest | CloseSession | None  # None: the engine is not asked
    outputs: Outputs | None  # None: nothing is generated
    has_stop_strings: bool
    answer: str = ""  # where nothing is generated


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
            pooling=given.pooling,
            stop_token_ids=self._stop_token_ids(sampling),
            bad_words_ids=self._bad_words_ids(sampling),
            bias_token_ids=bias_token_ids,
            bias_amounts=bias_amounts,
            grammar="" if grammar is None else self._compilable(grammar),
            grammar_name="" if grammar is None else grammar.name,
            end_token_ids=self._end_token_ids(sampling),
            request_id=given.request_id[:MAX_REQUEST_ID_CHARS],
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
        kind = EmbeddingStream if given.pooling else PromptStream if given.is_scoring else OutputStream
        return [kind(self._tokenizer, given, stop) for _ in range(given.options.n)]


def truncated(prompt_ids: Int32Array, sampling: SamplingParams, info: EngineInfo) -> Int32Array:
    """Keep the last tokens, as many as `truncate_prompt_tokens` says. Raise `InvalidRequest`."""
    count, most = sampling.truncate_prompt_tokens, info.max_num_tokens - 1
    if count is None:
        return prompt_ids
    if count > most:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {count}: it must be -1 (as many as fit) or 1 to {most}, which leaves a token "
            "of the context for the answer"
        )
    if count == -1:
        max_tokens = sampling.max_tokens or 1
        count = most + 1 - (max_tokens if max_tokens <= most else 1)  # a longer answer is cut to the context
    return prompt_ids[-count:]


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
    options, prompt = _options(given), _prompt_options(given)
    given.pop("pad_id", None)
    end_id = given.pop("end_id", None)
    values: dict[str, Any] = {**(defaults or {}), **{key: entry.value for key, entry in given.items()}}
    if end_id is not None:
        values["stop_token_ids"] = tuple(dict.fromkeys((*values.get("stop_token_ids", ()), end_id.value)))
    is_scoring = values.get("max_tokens") == 0 and (bool(prompt.echo) or "prompt_logprobs" in values)
    if is_scoring:
        values["max_tokens"] = 1  # is not returned: with it, all of the prompt is computed
    return ParsedParameters(SamplingParams(**values), options, prompt, is_scoring)


def check_task_parameters(sources: Iterable[ParameterSource], task: str) -> None:
    """Raise `InvalidRequest` for parameters that have no meaning for another task than generating."""
    known = _TASK_KEYS - {"return_token_strs"} | _EMBEDDING_KEYS if task == "embed" else _TASK_KEYS
    given = _collect(with_grammar(tuple(sources)))
    for name in sorted(given.keys() - known):
        value = given[name].value
        name = value.name if isinstance(value, Grammar) else name
        raise InvalidRequest(f"{name} does not go with the task {task}: leave it out")


def _prompt_options(given: dict[str, _Given]) -> PromptOptions:
    """Take the options out of `given`."""
    return PromptOptions(**{key: given.pop(key).value for key in PROMPT_OPTIONS.keys() & given.keys()})  # type: ignore[arg-type]


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
    has_session = bool(options.session_id)
    return Urgency(priority, wire["deadline_ns"], wire["soft_deadline_ns"], options.tenant, has_session)


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
