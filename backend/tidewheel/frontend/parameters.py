"""Sampling parameters and options from all carriers and spellings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tidewheel.errors import InvalidRequest, Unsupported
from tidewheel.frontend import coercion
from tidewheel.frontend.absent import ABSENT
from tidewheel.frontend.coercion import Coercion, show
from tidewheel.frontend.options import RequestOptions
from tidewheel.frontend.values import GenerateRequest, ParameterSource
from tidewheel.request import Priority
from tidewheel.sampling import SamplingParams
from tidewheel.tenants import TenantLimits, limits_of

_MAX_KEY_CHARS = 64  # longer keys get no suggestion


def _to_priority(name: str, value: object) -> Priority:
    number = coercion.to_int(name, value)
    try:
        return Priority.from_wire(number)
    except ValueError:
        raise InvalidRequest(f"{name} is {number}: it must be 0 (default) to {max(Priority)} (lowest)") from None


_OPTIONS: dict[str, Coercion] = {
    "n": coercion.to_int,
    "priority": _to_priority,
    **dict.fromkeys(("tenant", "cache_salt", "session_id"), coercion.to_text),
    **dict.fromkeys(("deadline_ms", "soft_deadline_ms", "session_ttl_s"), coercion.to_float),
    "close_session": coercion.to_bool,
}
_COERCIONS: dict[str, Coercion] = {
    **_OPTIONS,
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "logprobs"), coercion.to_int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), coercion.to_float),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), coercion.to_float),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"), coercion.to_bool),
    **dict.fromkeys(("stop", "bad_words"), coercion.to_texts),
    "stop_token_ids": coercion.to_ints,
    "logit_bias": coercion.to_bias,
    "best_of": coercion.to_int,
    "end_id": coercion.to_int,  # an additional stop token
    "pad_id": coercion.to_int,  # ignored: sequences are never padded
}
_ALIASES = {
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
    "min_length": "min_tokens",
    "stop_words": "stop",
    "random_seed": "seed",
}
_KNOWN = (*_COERCIONS, *_ALIASES, *ABSENT)
_OF_URGENCY = ("priority", "tenant", "deadline_ms", "soft_deadline_ms")
_OF_CLOSING = frozenset({"close_session", "session_id", "tenant"})


class ParsedParameters(NamedTuple):
    sampling: SamplingParams
    options: RequestOptions


class Urgency(NamedTuple):
    """Place in front-end queues. Deadline 0: none."""

    priority: int = Priority.NORMAL
    deadline_ns: int = 0
    soft_deadline_ns: int = 0


class _Given(NamedTuple):
    value: object
    label: str  # key and carrier, for errors


def parse_parameters(
    sources: Iterable[ParameterSource], defaults: Mapping[str, float] | None = None
) -> ParsedParameters:
    """Merge all carriers over `defaults`. Null counts as not given.

    Raise `InvalidRequest` for unknown, malformed, contradictory or out-of-range values, and `Unsupported` for known
    parameters that are not offered.
    """
    given = _collect(sources)
    options = _options(given)
    given.pop("pad_id", None)
    end_id = given.pop("end_id", None)
    values: dict[str, Any] = {**(defaults or {}), **{key: entry.value for key, entry in given.items()}}
    if end_id is not None:
        values["stop_token_ids"] = tuple(dict.fromkeys((*values.get("stop_token_ids", ()), end_id.value)))
    return ParsedParameters(SamplingParams(**values), options)


def read_urgency(request: GenerateRequest, arrival_ns: int, tenants: Mapping[str, TenantLimits]) -> Urgency:
    """Read the urgency before other parameters. The tenant may lower the class.

    Malformed values count as not given: `parse_parameters` refuses them later.
    """
    sources = (
        ParameterSource(origin=source.origin, values={key: source.values.get(key) for key in _OF_URGENCY})
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
    """Return coerced values by canonical name."""
    given: dict[str, _Given] = {}
    for source in sources:
        for key, raw in source.values.items():
            if raw is None or _is_neutral(key, raw):
                continue
            name = _ALIASES.get(key, key)
            value = _COERCIONS[name](key, raw)
            if value == () or value == {}:
                continue  # empty lists request nothing
            entry = _Given(value, f"{key} in {source.origin}")
            earlier = given.setdefault(name, entry)
            if earlier is not entry and earlier.value != value:
                raise InvalidRequest(
                    f"{earlier.label} is {show(earlier.value)} and {entry.label} is {show(value)}: give one value"
                )
    return given


def _is_neutral(key: str, raw: object) -> bool:
    """Return whether an absent feature is not requested; raise if requested or unknown."""
    if key in _COERCIONS or key in _ALIASES:
        return False
    feature = ABSENT.get(key)
    if feature is None:
        raise InvalidRequest(_unknown(key))
    if not feature.is_neutral(raw):
        raise Unsupported(f"{key} is {show(raw)}: {feature.reason}")
    return True


def _unknown(key: str) -> str:
    near = difflib.get_close_matches(key, _KNOWN, n=1) if len(key) <= _MAX_KEY_CHARS else []
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(_COERCIONS))}"
    return f"unknown parameter {show(key)}: {hint}"


def _options(given: dict[str, _Given]) -> RequestOptions:
    """Move the options out of `given`."""
    closing, others = given.get("close_session"), sorted(given.keys() - _OF_CLOSING)
    if closing is not None and closing.value and others:
        raise InvalidRequest(f"close_session is true: it goes with session_id and tenant, not with {others[0]}")
    values = {key: given.pop(key).value for key in _OPTIONS.keys() & given.keys()}
    options = RequestOptions(**values)  # type: ignore[arg-type]
    best_of = given.pop("best_of", None)
    if best_of is not None and best_of.value != options.n:
        raise Unsupported(f"best_of is {best_of.value} and n is {options.n}: all sequences are returned, none chosen")
    return options
