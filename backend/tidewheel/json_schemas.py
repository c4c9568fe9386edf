"""Keywords of JSON schemas that llguidance reads otherwise than a client means."""

from __future__ import annotations

from collections.abc import Iterator

from tidewheel.errors import Unsupported

MOST_BOUND = 2**53  # llguidance keeps bounds as floats, which hold all integers up to here

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_VALUES = ("const", "enum", "default", "examples")
_SHOWN_CHARS = 80


def check_bounds(name: str, schema: object) -> None:
    """Raise `Unsupported` for a bound that a float does not hold exactly."""
    for keyword, value in _keywords(schema):
        if keyword not in _BOUNDS or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        most = MOST_BOUND - keyword.startswith("exclusive")  # the next integer must be exact too
        if not -most <= value <= most:
            shown = f"{keyword} is {str(value)[:_SHOWN_CHARS]}"
            raise Unsupported(f"{name}: {shown}: bounds beyond {most} are not supported; set a nearer one")


def check_options(name: str, schema: object) -> None:
    """Raise `Unsupported` for llguidance's options, which can give texts that are no JSON."""
    for keyword, _ in _keywords(schema):
        if keyword == "x-guidance":
            raise Unsupported(f"{name}: x-guidance is set: options of llguidance are not supported; leave it out")


def read_plainly(schema: object) -> None:
    """Rewrite valid JSON schema that llguidance refuses: counts such as 2.0, and a false `uniqueItems`."""
    for part in _parts(schema):
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        for keyword in _COUNTS:
            value = part.get(keyword)
            if isinstance(value, float) and value.is_integer():
                part[keyword] = int(value)


def _keywords(schema: object) -> Iterator[tuple[str, object]]:
    for part in _parts(schema):
        yield from part.items()


def _parts(schema: object) -> Iterator[dict[str, object]]:
    """Yield a schema and the schemas in it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list | tuple):
            waiting += part
        elif isinstance(part, dict):
            yield part
            for keyword, value in part.items():
                waiting += _schemas(keyword, value)


def _schemas(keyword: str, value: object) -> list[object]:
    if keyword in _OF_VALUES:
        return []
    return list(value.values()) if keyword in _OF_NAMES and isinstance(value, dict) else [value]
