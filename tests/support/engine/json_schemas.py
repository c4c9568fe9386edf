"""JSON schemas in the styles of public suites: function calls, records, unions, recursion; and random ones."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def closed(properties: Schema, required: list[str] | None = None, **others: Any) -> Schema:
    """Return an object of these properties alone, all required if not told otherwise."""
    names = list(properties) if required is None else required
    return {
        "type": "object", "properties": properties, "required": names, "additionalProperties": False, **others,
    }  # fmt: skip


TREE = closed({"value": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"$ref": "#/$defs/tree"}}, ["value"])
WRITTEN: list[Schema] = [
    closed({"location": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}}),
    closed({"name": {"const": "search"}, "arguments": closed({"query": {"type": "string", "maxLength": 9}})}),
    {"anyOf": [closed({"ok": {"const": True}}), closed({"error": {"type": "string", "maxLength": 5}})]},
    {"oneOf": [{"type": "integer", "minimum": 1, "maximum": 99}, {"type": "null"}]},
    {"type": "array", "items": {"enum": ["a", "b", 3, None, {"x": [1]}]}, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    closed({"at": {"type": "string", "format": "date-time"}, "id": {"type": "string", "format": "uuid"}}),
    closed({"day": {"type": "string", "format": "date"}, "host": {"type": "string", "format": "ipv4"}}),
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    {"type": "string", "pattern": "^(foo|ba[rz])+$", "maxLength": 9},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": ["boolean", "null"]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x_[a-c]$": {"type": "null"}}, "additionalProperties": False},
    {"allOf": [closed({"a": {"type": "integer"}, "b": {"type": "boolean"}}), {"properties": {"a": {"maximum": 5}}}]},
    {"enum": ["é", "日本", "\"quoted\\\"", "🎉"]},
    closed({"a b": {"type": "null"}, "ö": {"type": "boolean"}, "": {"const": 0}}, ["ö"]),
]  # fmt: skip


def random_schema(draw: random.Random, depth: int = 3) -> Schema:
    makers = [_string, _integer, _number, _choice, _boolean]
    if depth:
        makers += [_object, _object, _array, _union]
    return draw.choice(makers)(draw, depth - 1)


def random_schemas(count: int) -> list[Schema]:
    draw = random.Random(17)
    return [random_schema(draw) for _ in range(count)]


def _string(draw: random.Random, _: int) -> Schema:
    patterns = ("^[a-z]{1,5}$", "^\\d+(\\.\\d{2})?$", "^#[0-9a-f]{6}$", "^(yes|no)$")
    if draw.random() < 0.5:
        return {"type": "string", "pattern": draw.choice(patterns), "description": "of a form"}
    shortest = draw.randrange(3)
    return {"type": "string", "minLength": shortest, "maxLength": shortest + draw.randrange(1, 6)}


def _integer(draw: random.Random, _: int) -> Schema:
    low = draw.randrange(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(200)}


def _number(draw: random.Random, _: int) -> Schema:
    return {"type": "number", "minimum": 0, "maximum": draw.choice([1, 2.5, 100])}


def _choice(draw: random.Random, _: int) -> Schema:
    return {"enum": draw.sample(["red", "green", 1, 2.5, None, True, "a b", "\n"], draw.randrange(1, 5))}


def _boolean(draw: random.Random, _: int) -> Schema:
    return {"type": draw.choice(["boolean", "null"]), "title": "A flag"}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(["id", "name", "is ok", "größe", "list", "x-1"], draw.randrange(1, 4))
    return closed({name: random_schema(draw, depth) for name in names}, [n for n in names if draw.random() < 0.7])


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randrange(2)
    items = random_schema(draw, depth)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + draw.randrange(3)}


def _union(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(draw, depth) for _ in range(2)]}
