import math
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Protocol

import msgspec

from tidewheel.batch import Float32Array, Int32Array
from tidewheel.config import setting_names
from tidewheel.errors import InvalidRequest, TidewheelError, Unsupported
from tidewheel.frontend import coercion
from tidewheel.frontend.coercion import INPUT_TENSOR, Coercion, ParameterSource, expect, show
from tidewheel.frontend.grammar_parameters import GRAMMAR_PARAMETERS, find_grammar
from tidewheel.frontend.output import Generation
from tidewheel.grammar import Grammar
from tidewheel.one_shot.shared_tensors import PackedTensors
from tidewheel.one_shot.signature import Arrays
from tidewheel.parameters import Parameter, ParameterField, fields_of
from tidewheel.request_options import ORDERS, PromptOptions, RequestOptions, to_priority
from tidewheel.sampling import SamplingParams
from tidewheel.settings import nearest
from tidewheel.tenants import TenantLimits, limits_of

Task = Literal["generate", "tokenize", "detokenize", "embed"]
AnyTask = Literal[Task, "infer"]  # "infer": of a one-shot model
WORDS, WEIGHTS = "embedding_bias_words", "embedding_bias_weights"
_MAX_KEY_CHARS = 64  # longer keys get no suggestion
_URGENCY_KEYS = ("priority", "qos_class", "tenant", "deadline_ms", "soft_deadline_ms", "session_id")
_SERVICE = frozenset({"priority", "tenant", "deadline_ms", "soft_deadline_ms"})
_PROMPT = _SERVICE | {"add_special_tokens", "add_generation_prompt"}
_TOKENIZE = _PROMPT | {"return_token_strs"}
_EMBED = _PROMPT | {"cache_salt", "truncate_prompt_tokens", "lora_name"}
_OF_TASK: Mapping[AnyTask, frozenset[str]] = {
    "tokenize": _TOKENIZE, "detokenize": _TOKENIZE, "embed": _EMBED, "infer": _SERVICE
}  # fmt: skip


class RemoteCall(Protocol):
    outputs: Arrays | None  # set before `done`, if the call succeeds

    def start(self, done: Callable[[TidewheelError | None], None]) -> None: ...  # `done` is called on any thread

    def discard(self) -> None: ...  # frees the tensors of a request that is answered


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    request_id: str = ""
    task: AnyTask = "generate"
    text: str | bytes | None = None
    input_ids: Int32Array | None = None  # [num_prompt_tokens]
    messages: str | bytes | None = None  # JSON list of chat messages
    audio: Float32Array | None = None  # [num_samples] at 16 kHz
    audio_file: bytes | None = None
    given: Generation | None = None  # window of audio, which is read already
    inputs: PackedTensors | None = None  # of a one-shot model; with `call`, without data
    call: RemoteCall | None = None  # of another model with the request's tensors, when the engine says so
    parameters: tuple[ParameterSource, ...] = ()
    stream: bool = False
    echo: bool = False  # prompt before the text (not when streaming)
    arrival_ns: int = field(default_factory=time.monotonic_ns)
    traceparent: str = ""  # W3C's
    timeout_us: int = 0  # from the arrival, by Triton or the entry; 0: none

    @property
    def prompt_bytes(self) -> int:
        """Return a lower bound of the prompt's bytes."""
        arrays = sum(array.nbytes for array in (self.input_ids, self.audio) if array is not None)
        return arrays + sum(len(text or "") for text in (self.text, self.messages, self.audio_file))


class EnsembleParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of TensorRT-LLM's ensemble that become others."""

    best_of: Annotated[int | None, Parameter("must be `n`: all sequences are returned", is_tensor=False)] = None
    end_id: Annotated[int | None, Parameter("one more of `stop_token_ids`")] = None
    pad_id: Annotated[int | None, Parameter("without effect: nothing is padded")] = None


FIELDS: Mapping[str, ParameterField] = {
    name: field
    for struct in (SamplingParams, RequestOptions, PromptOptions, EnsembleParameters)
    for name, field in fields_of(struct).items()
}
ALIASES = {
    alias: name
    for name, field in FIELDS.items()
    for alias in (*field.parameter.aliases, *field.parameter.tensor_aliases)
}


def _to_allowed(name: str, value: object) -> tuple[int, ...]:
    allowed = coercion.to_ints(name, value)
    if not allowed:
        raise InvalidRequest(f"{name} is empty, which allows no token: name some, or leave it out")
    return allowed


def _refuse_grammar(name: str, value: object) -> NoReturn:
    raise InvalidRequest(f"{name} is {show(value)}: send guided_grammar or structured_outputs")


COERCIONS_BY_KIND: Mapping[str, Coercion] = {
    "integer": coercion.to_int, "number": coercion.to_float, "true or false": coercion.to_bool,
    "text": coercion.to_text, "list of texts": coercion.to_texts, "list of token ids": coercion.to_ints,
    "object of token id to number": coercion.to_bias, "grammar": _refuse_grammar,
    "priority": to_priority,
}  # fmt: skip
COERCIONS: Mapping[str, Coercion] = {name: COERCIONS_BY_KIND[field.kind] for name, field in FIELDS.items()} | {
    "seed": lambda name, value: None if (seed := coercion.to_int(name, value)) == -1 else seed,
    "allowed_token_ids": _to_allowed,
}  # fmt: skip


class AbsentFeature(NamedTuple):
    """Parameter in `absent_parameters.toml`, refused unless its value is neutral."""

    reason: str
    neutral: Sequence[object] = ("", False, [])  # beside null


_absent = tomllib.loads(Path(__file__).with_name("absent_parameters.toml").read_text(encoding="utf-8"))["absent"]
ABSENT = {name: AbsentFeature(**group) for group in _absent for name in group.pop("names")}

SUGGESTED = (*COERCIONS, *ALIASES, WORDS, WEIGHTS, *GRAMMAR_PARAMETERS)


class ParsedParameters(NamedTuple):
    sampling: SamplingParams
    options: RequestOptions
    prompt: PromptOptions = PromptOptions()
    is_scoring: bool = False  # nothing is generated


_DEFAULTS = ParsedParameters(SamplingParams(), RequestOptions())


class _GivenValue(NamedTuple):
    value: object
    label: str  # key and carrier, for errors


def parse_parameters(
    sources: Sequence[ParameterSource], defaults: Mapping[str, Any] | None = None, task: AnyTask = "generate"
) -> ParsedParameters:
    """Merge all sources' parameters over `defaults`; a null is absent. Raise `InvalidRequest` or `Unsupported`."""
    if not sources and not defaults:
        return _DEFAULTS
    given = _collect(sources)
    for name in sorted(given.keys() - _OF_TASK.get(task, given.keys())):
        value = given[name].value
        name = value.name if isinstance(value, Grammar) else name
        raise InvalidRequest(f"{name} does not go with the task {task}: leave it out")
    options, prompt = _take_options(given), PromptOptions(**_take(given, PromptOptions))
    ensemble = EnsembleParameters(**_take(given, EnsembleParameters))
    values: dict[str, Any] = {**(defaults or {}), **_take(given, SamplingParams)}
    if ensemble.best_of not in (None, options.n):
        raise Unsupported(
            f"best_of is {ensemble.best_of} and n is {options.n}: all sequences are returned, none chosen"
        )
    if ensemble.end_id is not None:
        values["stop_token_ids"] = tuple(dict.fromkeys((*values.get("stop_token_ids", ()), ensemble.end_id)))
    is_scoring = values.get("max_tokens") == 0 and (prompt.echo or "prompt_logprobs" in values)
    if is_scoring:
        values["max_tokens"] = 1  # not returned, but all of the prompt is computed
    return ParsedParameters(SamplingParams(**values), options, prompt, is_scoring)


def read_urgency(request: GenerateRequest, tenants: Mapping[str, TenantLimits]) -> RequestOptions:
    """Return granted class, tenant, deadlines and session; defaults if `parse_parameters` will refuse a value."""
    if not request.parameters and not tenants:
        return _DEFAULTS.options
    sources = [
        ParameterSource(origin=source.origin, values={key: source.values.get(key) for key in _URGENCY_KEYS})
        for source in request.parameters
    ]
    try:
        options = _take_options(_collect(sources))
    except InvalidRequest:
        options = RequestOptions()
    granted = limits_of(tenants, options.tenant).granted(options.priority)
    return msgspec.structs.replace(options, priority=granted)


def with_token_biases(
    sources: tuple[ParameterSource, ...], encode: Callable[[str], Iterable[int]]
) -> tuple[ParameterSource, ...]:
    """Replace TensorRT-LLM's `embedding_bias_words` and weights by a `logit_bias` of each word's tokens.

    Raise `InvalidRequest` for lists of unequal length or wrong types.
    """
    replaced: list[ParameterSource] = []
    for source in sources:
        others = {name: value for name, value in source.values.items() if name not in (WORDS, WEIGHTS)}
        replaced.append(ParameterSource(origin=source.origin, values=others))
        given = ((name, source.values.get(name)) for name in (WORDS, WEIGHTS))
        words, weights = ([] if value is None else expect(name, value, list, "a list") for name, value in given)
        if len(words) != len(weights):
            counts = f"{WORDS} has {len(words)} entries and {WEIGHTS} {len(weights)}"
            raise InvalidRequest(f"{counts}: give one weight a word")
        bias: dict[int, float] = {}
        for word, weight in zip(words, weights, strict=True):
            for token_id in map(int, encode(coercion.to_text(WORDS, word))):
                bias[token_id] = bias.get(token_id, 0.0) + coercion.to_float(WEIGHTS, weight)
        if bias:
            replaced.append(ParameterSource(origin=WORDS, values={"logit_bias": bias}))
    return tuple(replaced)


def _collect(sources: Sequence[ParameterSource]) -> dict[str, _GivenValue]:
    given: dict[str, _GivenValue] = {}
    grammar = find_grammar(sources)
    if grammar is not None:
        given["grammar"] = _GivenValue(grammar, grammar.name)
    for source in sources:
        for key, raw in source.values.items():
            if raw is None or key in GRAMMAR_PARAMETERS or _is_neutral(key, raw):
                continue
            name = ALIASES.get(key, key)
            value = COERCIONS[name](key, raw)
            if source.origin == INPUT_TENSOR and value in (math.inf, -math.inf):
                raise InvalidRequest(
                    f"{key} is {value}: it must be finite; its tensor is FP32, which holds numbers up to 3.4e+38"
                )
            if value == () or value == {}:
                continue
            entry = _GivenValue(value, f"{key} in {source.origin}")
            earlier = given.setdefault(name, entry)
            if earlier is not entry and earlier.value != value:
                raise InvalidRequest(
                    f"{earlier.label} is {show(earlier.value)} and {entry.label} is {show(value)}: give one value"
                )
    return given


def _is_neutral(key: str, raw: object) -> bool:
    if key in COERCIONS or key in ALIASES:
        return False
    feature = ABSENT.get(key)
    if feature is None:
        raise InvalidRequest(_unknown(key))
    if not any(raw == known and isinstance(raw, bool) == isinstance(known, bool) for known in feature.neutral):
        raise Unsupported(f"{key} is {show(raw)}: {feature.reason}")
    return True


def _unknown(key: str) -> str:
    if key in setting_names():
        return f"unknown parameter {key!r}: it is a setting of the entry, not of a request"
    near = nearest(key, SUGGESTED) if len(key) <= _MAX_KEY_CHARS else ""
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(sorted(COERCIONS))}"
    return f"unknown parameter {show(key)}: {hint}"


def _take(given: dict[str, _GivenValue], struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {key: given.pop(key).value for key in fields_of(struct).keys() & given.keys()}


def _take_options(given: dict[str, _GivenValue]) -> RequestOptions:
    names = set(given)
    options = RequestOptions(**_take(given, RequestOptions))
    order = options.order
    if order and (others := sorted(names - {order, *ORDERS[order]})):
        *first, last = ORDERS[order]
        raise InvalidRequest(f"{order} is set: it goes with {', '.join(first)} and {last}, not with {others[0]}")
    return options
