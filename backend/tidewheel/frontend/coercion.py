"""Conversion of JSON and tensor values to parameter types. Clients send numbers as strings, too.

A wrong type raises `InvalidRequest` with the parameter's name. Ranges are checked later.
"""

import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tidewheel.errors import InvalidRequest, PromptTooLarge
from tidewheel.settings import BOOLEANS

Coercion = Callable[[str, object], object]
_KindT = TypeVar("_KindT")
INPUT_TENSOR = "input tensor"  # origin of parameters

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")  # longest in use: 2**64 - 1
_INTEGER_LIMIT = 10**20
_EXACT_LIMIT = 2**53  # of integers in a float, to which Triton turns request parameters beyond 64 bits
_NUMBER = re.compile(r"[+-]?(nan|inf(inity)?|([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?)", re.ASCII | re.IGNORECASE)

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = _shortened.maxlong = 80
_shortened.maxlist = _shortened.maxtuple = _shortened.maxdict = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    origin: str  # "sampling_parameters", "request parameter", `INPUT_TENSOR`
    values: Mapping[str, object]


def show(value: object) -> str:
    """Return a value's short text for errors."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _INTEGER_LIMIT:
        return f"an integer of {value.bit_length()} bits"
    return _shortened.repr(value)


def expect(name: str, value: object, kind: type[_KindT], wanted: str) -> _KindT:
    """Return the value. Raise `InvalidRequest` that says what is wanted if it is not of this type."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} is {show(value)}: it must be {wanted}")
    return value


def parse_json(text: str | bytes, name: str) -> object:
    """Parse JSON, NaN and Infinity included. Raise `InvalidRequest` naming the field, also for duplicate keys."""
    try:
        return json.loads(to_text(name, text), object_pairs_hook=lambda pairs: _unique(pairs, name))
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{name} is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise InvalidRequest(f"{name} is not JSON that can be read: it is nested too deep") from None
    except ValueError:  # limit of the interpreter on digits
        raise InvalidRequest(f"{name} holds an integer with thousands of digits") from None


def _unique(pairs: list[tuple[str, object]], name: str) -> dict[str, object]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
    raise InvalidRequest(f"{name} has the key {show(key)} twice")


def check_size(name: str, num_bytes: int, limit: int, setting: str = "") -> None:
    """Raise `PromptTooLarge` above `limit` bytes, naming the setting of the limit."""
    if num_bytes > limit:
        suffix = f" ({setting})" if setting else ""
        raise PromptTooLarge(f"{name} has {num_bytes} bytes: at most {limit} are allowed{suffix}")


def to_int(name: str, value: object) -> int:
    number = _number(name, value, "an integer")
    if isinstance(number, float) and not number.is_integer():
        raise InvalidRequest(f"{name} is {show(value)}: it must be an integer")
    exact = _in_range(name, int(number))
    if isinstance(number, float) and abs(number) > _EXACT_LIMIT:
        raise InvalidRequest(
            f"{name} arrived as the float {number:g}, which is exact only up to {_EXACT_LIMIT}: send it as text"
        )
    return exact


def to_float(name: str, value: object) -> float:
    number = _number(name, value, "a number")
    return float(_in_range(name, number) if isinstance(number, int) else number)


def to_bool(name: str, value: object) -> bool:
    meant = BOOLEANS.get(to_text(name, value).strip().lower()) if isinstance(value, str | bytes) else value
    if isinstance(meant, int | float) and meant in (0, 1):
        return bool(meant)
    raise InvalidRequest(f"{name} is {show(value)}: it must be true or false")


def to_text(name: str, value: object) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from None
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {show(value)}: it must be text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON allows lone surrogates, tokenizers do not
        raise InvalidRequest(f"{name} is not valid Unicode: a lone surrogate at character {error.start}") from None
    return value


def to_texts(name: str, value: object) -> tuple[str, ...]:
    """Return the texts that are not empty (TensorRT-LLM clients pad). Raise `InvalidRequest` for an empty `stop`."""
    items = value if isinstance(value, list | tuple) else [value]
    texts = tuple(to_text(name, item) for item in items)
    if name == "stop" and "" in texts:
        raise InvalidRequest("stop holds an empty string: leave it out")
    return tuple(filter(None, texts))


def to_ints(name: str, value: object) -> tuple[int, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(to_int(name, item) for item in items)


def to_bias(name: str, value: object) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, amount in expect(name, value, dict, "an object of token id to bias").items():
        token_id = to_int(f"{name} token id", key)
        if token_id in bias:
            raise InvalidRequest(f"{name} has the token id {token_id} twice")
        bias[token_id] = to_float(f"{name}[{token_id}]", amount)
    return bias


def _number(name: str, value: object, kind: str) -> int | float:
    if isinstance(value, str | bytes):
        text = to_text(name, value).strip()
        if not _NUMBER.fullmatch(text):
            raise InvalidRequest(f"{name} is {show(value)}: it must be a number")
        value = int(text) if _INTEGER.fullmatch(text) else float(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} is {show(value)}: it must be {kind}")
    return value


def _in_range(name: str, number: int) -> int:
    if abs(number) >= _INTEGER_LIMIT:
        raise InvalidRequest(f"{name} is {show(number)}: it is out of range")
    return number
