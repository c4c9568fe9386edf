"""JSON types that an argument may have by its schema, for formats that write strings without quotes."""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_CLASSES: dict[str, Any] = {
    "string": str, "null": type(None), "boolean": bool, "integer": int, "number": (int, float),
    "array": list, "object": dict
}  # fmt: skip
STRING = frozenset({"string"})
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})


def alternatives(schema: object, root: Schema) -> Iterator[Schema]:
    """Yield the schemas, without notes, that a lone `anyOf`, `oneOf` or `$ref` into `root` leads to."""
    waiting, seen = [schema], set[str]()
    while waiting:
        part = waiting.pop(0)
        given = part if isinstance(part, Mapping) else {"not": {}} if part is False else {}
        match own := {key: value for key, value in given.items() if key not in NOTES}:
            case {"$ref": str(reference)} if len(own) == 1 and reference not in seen:
                seen.add(reference)
                found: object = root
                for name in reference.split("/")[1:]:
                    found = found.get(name) if isinstance(found, Mapping) else None
                waiting.append(found)
            case {"anyOf": list(choices)} | {"oneOf": list(choices)} if len(own) == 1:
                waiting += choices
            case _:
                yield own


def values_of(schema: Schema) -> list[Any] | None:
    """Return the values of an enumeration; None: any."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def own_types(schema: Schema) -> frozenset[str]:
    """Return the JSON types of a schema of `alternatives`: all if it names none."""
    given, values = schema.get("type", list(_CLASSES)), values_of(schema)
    names = [name for name in _CLASSES if name == given or (isinstance(given, list) and name in given)]
    return frozenset(name for name in names if values is None or any(has_type(value, name) for value in values))


def has_type(value: object, name: str) -> bool:
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _CLASSES[name]) and (name == "boolean" or not isinstance(value, bool))


def types_of(schema: object, root: Schema) -> frozenset[str]:
    """Return the JSON types of an argument's values."""
    return frozenset[str]().union(*map(own_types, alternatives(schema, root)))
