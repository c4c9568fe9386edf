"""Values as clients send them to the type that a parameter has: existing clients send numbers as strings.

Each function takes the name for its error and any value of JSON or of a tensor; what cannot be meant raises
`InvalidRequest`. Ranges are checked later, by `SamplingParams`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping

from tidewheel.errors import InvalidRequest

Coercion = Callable[[str, object], object]

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")  # nothing in use is longer than 2**64 - 1
_INTEGER_LIMIT = 10**20
_NUMBER = re.compile(r"[+-]?(nan|inf(inity)?|([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?)", re.ASCII | re.IGNORECASE)
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = _shortened.maxlong = 80
_shortened.maxlist = _shortened.maxtuple = _shortened.maxdict = 8


def show(value: object) -> str:
    """A value inside an error message, cut to a bearable length."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _INTEGER_LIMIT:
        return f"an integer of {value.bit_length()} bits"
    return _shortened.repr(value)


def to_int(name: str, value: object) -> int:
    number = _number_from_text(name, value) if isinstance(value, str | bytes) else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidRequest(f"{name} is {show(value)}: it must be an integer")
    if abs(number) >= _INTEGER_LIMIT:
        raise InvalidRequest(f"{name} is {show(number)}: it is out of range")
    return number


def to_float(name: str, value: object) -> float:
    number = _number_from_text(name, value) if isinstance(value, str | bytes) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise InvalidRequest(f"{name} is {show(value)}: it must be a number")
    if isinstance(number, int) and abs(number) >= _INTEGER_LIMIT:
        raise InvalidRequest(f"{name} is {show(number)}: it is out of range")
    return float(number)


def to_bool(name: str, value: object) -> bool:
    text = to_text(name, value) if isinstance(value, str | bytes) else None
    if text is not None and (known := _BOOLEANS.get(text.strip().lower())) is not None:
        return known
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    raise InvalidRequest(f"{name} is {show(value)}: it must be true or false")


def to_text(name: str, value: object) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from None
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {show(value)}: it must be text")
    check_unicode(name, value)
    return value


def check_unicode(name: str, text: str) -> None:
    """JSON can spell half of a surrogate pair; no tokenizer and no wire can take it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not valid Unicode: a lone surrogate at character {error.start}") from None


def to_texts(name: str, value: object) -> tuple[str, ...]:
    """A text or a list of them; empty ones are dropped, because clients send `[""]` for none."""
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(text for item in items if (text := to_text(name, item)))


def to_ints(name: str, value: object) -> tuple[int, ...]:
    """An integer or a list of them."""
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(to_int(name, item) for item in items)


def to_bias(name: str, value: object) -> dict[int, float]:
    """Token id to bias; JSON spells the ids as text."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is {show(value)}: it must be an object of token id to bias")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        token_id = to_int(f"{name} token id", key)
        if token_id in bias:
            raise InvalidRequest(f"{name} has the token id {token_id} twice")
        bias[token_id] = to_float(f"{name}[{token_id}]", amount)
    return bias


def _number_from_text(name: str, value: str | bytes) -> int | float:
    text = to_text(name, value).strip()
    if _INTEGER.fullmatch(text):
        return int(text)
    if not _NUMBER.fullmatch(text):
        raise InvalidRequest(f"{name} is {show(value)}: it must be a number")
    return float(text)
