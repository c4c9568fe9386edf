"""Declaration of request parameters: each is a field of a struct, with its limits and names beside its type."""

import functools
import math
import re
import typing
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from tidewheel.errors import InvalidRequest

MAX_INT32 = 2**31 - 1
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_KINDS: dict[object, str] = {
    int: "integer", float: "number", bool: "true or false", str: "text", tuple[str, ...]: "list of texts",
    tuple[int, ...]: "list of token ids", Mapping[int, float]: "object of token id to number",
}  # fmt: skip


class Parameter(NamedTuple):
    """Annotation of a parameter's field. For a list, `low`, `high` and `max_bytes` limit each entry."""

    meaning: str
    aliases: tuple[str, ...] = ()
    tensor_aliases: tuple[str, ...] = ()  # names of input tensors too
    low: float | None = None
    high: float | None = None
    above: float | None = None  # lower limit that is not allowed itself
    outside: tuple[int, ...] = ()  # allowed numbers outside of the limits
    max_entries: int | None = None
    max_bytes: int | None = None
    max_chars: int | None = None
    choices: tuple[str, ...] = ()  # of a text; none: any
    is_printable: bool = False  # without control characters
    is_tensor: bool = True  # an input tensor has the name

    @property
    def range(self) -> str:
        """Return the limits of a number as text; empty without limits."""
        if self.above is not None:
            limits = f"above {self.above:g}" + ("" if self.high is None else f" and at most {self.high:g}")
        elif self.low is None:
            return ""
        else:
            limits = f"{_number(self.low)} to {_number(self.high)}"
        return "".join(f"{value} or " for value in self.outside) + limits

    def check_integer(self, name: str, value: object) -> None:
        """Raise `InvalidRequest` that names field, value and limit."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(f"{name} is {value!r}: it must be an integer")
        self._check_range(name, value)

    def check_number(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"{name} is {value!r}: it must be a number")
        if not -math.inf < value < math.inf:  # unlike `isfinite`, for integers of any size
            raise InvalidRequest(f"{name} is {value!r}: it must be finite")
        self._check_range(name, value)

    def check_text(self, name: str, value: object) -> None:
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} is {value!r}: it must be text")
        if self.max_chars is not None and len(value) > self.max_chars:
            raise InvalidRequest(f"{name} has {len(value)} characters: at most {self.max_chars} are allowed")
        size = len(value.encode("utf-8", "surrogatepass"))
        if self.max_bytes is not None and size > self.max_bytes:
            raise InvalidRequest(f"{name} has {size} bytes: at most {self.max_bytes} are allowed")
        if self.choices and value not in self.choices:
            raise InvalidRequest(f"{name} is {value!r}: it must be {' or '.join(self.choices)}")
        if self.is_printable and (control := control_character(value)):
            raise InvalidRequest(f"{name} holds {control}: remove it")

    def check_texts(self, name: str, values: tuple[object, ...]) -> None:
        check_count(name, len(values), self.max_entries)
        for value in values:
            self.check_text(f"an entry of {name}", value)
        if "" in values:
            raise InvalidRequest(f"{name} holds an empty string")

    def check_token_ids(self, name: str, values: tuple[object, ...]) -> None:
        check_count(name, len(values), self.max_entries)
        for value in values:
            self.check_integer(name, value)

    def _check_range(self, name: str, value: float) -> None:
        is_within = (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )
        if not is_within and value not in self.outside:
            raise InvalidRequest(f"{name} is {_number(value)}: it must be {self.range}")


def at_least(low: int, meaning: str, **more: typing.Any) -> Parameter:
    """Declare an integer parameter from `low` to the largest INT32."""
    return Parameter(meaning, low=low, high=MAX_INT32, **more)


class ParameterField(NamedTuple):
    name: str
    kind: str
    default: object
    parameter: Parameter
    check: Callable[[str, typing.Any], None] | None  # raises `InvalidRequest`


@functools.cache
def fields_of(struct: type[msgspec.Struct]) -> Mapping[str, ParameterField]:
    return {found.name: _field(found) for found in msgspec.structs.fields(struct)}


def _field(found: msgspec.structs.FieldInfo) -> ParameterField:
    annotated, parameter = typing.get_args(found.type)
    is_optional = type(None) in typing.get_args(annotated)
    plain = typing.get_args(annotated)[0] if is_optional else annotated
    kind = _KINDS.get(plain, plain.__name__.lower() if isinstance(plain, type) else "")
    checks = {
        "integer": parameter.check_integer, "number": parameter.check_number, "text": parameter.check_text,
        "list of texts": parameter.check_texts, "list of token ids": parameter.check_token_ids,
    }  # fmt: skip
    default = None if found.default is msgspec.NODEFAULT else found.default
    return ParameterField(found.name, kind, default, parameter, checks.get(kind))


def check_fields(values: msgspec.Struct) -> None:
    """Raise `InvalidRequest` for the first field outside its limits."""
    for name, _, default, _, check in fields_of(type(values)).values():
        value = getattr(values, name)
        if check is not None and value is not default:
            check(name, value)


def check_count(name: str, count: int, limit: int | None) -> None:
    if limit is not None and count > limit:
        raise InvalidRequest(f"{name} has {count} entries: at most {limit} are allowed")


def control_character(text: str) -> str:
    """Describe the first control character and its position; empty without one."""
    found = _CONTROL.search(text)
    return f"the control character U+{ord(found[0]):04X} at position {found.start()}" if found else ""


def _number(value: float | None) -> str:
    return repr(value).removesuffix(".0")  # exact: a number just outside of its limits is not shown as the limit
