"""Calls of tools that a client forces, as a JSON schema that the answer follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel_client.errors import InvalidRequest

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_GRAMMARS = ("json", "json_object", "regex", "choice", "grammar", "decoding", "decoding_guide_type")
_FIELDS = ("structured_outputs", "response_format", *(f"guided_{name}" for name in _GRAMMARS))
_MOST_CHARS = 200  # of names in a message


def follows_grammar(params: Mapping[str, object]) -> bool:
    """Return whether an answer with these parameters is all grammar, without thoughts."""
    answer_format = params.get("response_format")
    is_format = answer_format is not None and answer_format != {"type": "text"}
    return is_format or any(name == "structured_outputs" or name.startswith("guided_") for name in params)


def check_no_grammar(params: Mapping[str, object]) -> None:
    """Raise `InvalidRequest` for a grammar beside a forced call, which is one too."""
    for name in _FIELDS:
        if _asks(name, params.get(name)):
            raise InvalidRequest(f"tool_choice forces a call, and {name} is set: send one of them")


def _asks(name: str, value: object) -> bool:
    if name == "guided_json":
        return value is not None  # {} is a schema too
    members = value.values() if isinstance(value, Mapping) else [value]
    return bool(value) and value != {"type": "text"} and any(member is not None for member in members)


def call_schema(functions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema of one call of any of these functions. Raise `InvalidRequest`.

    The call is `{"name": …, "arguments": {…}}`, which `spoken` understands, whichever model wrote it.
    """
    return {"anyOf": [_call(name, one.get("parameters") or _NO_PARAMETERS) for name, one in functions.items()]}


def parameters_name(functions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how a message names the schema of a forced call, which the client sent in parts."""
    names = " or ".join(functions)
    return f"tools: parameters of {names if len(names) <= _MOST_CHARS else 'a function'}"


def forced_functions(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return the functions of which one is called: the chosen one, or all for "required". Raise `InvalidRequest`."""
    functions = [tool.get("function") for tool in tools]
    known = {str(one["name"]): one for one in functions if isinstance(one, Mapping) and "name" in one}
    names = list(known) if tool_choice == "required" else [_chosen_name(tool_choice)]
    if not known or names[0] not in known:
        wanted = names[0] if names else "a tool"
        raise InvalidRequest(f"tool_choice forces a call of {wanted}: tools has no such function")
    return {name: known[name] for name in names}


def without_strict(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools of a forced call, which follows its schema anyway."""
    return [{**tool, "function": _without_strict(tool.get("function"))} for tool in tools]


def _without_strict(function: object) -> object:
    return (
        {key: value for key, value in function.items() if key != "strict"} if isinstance(function, dict) else function
    )


def _chosen_name(tool_choice: str | Mapping[str, Any]) -> str:
    match tool_choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidRequest(
        f"tool_choice is {str(tool_choice)[:80]!r}: it must be auto, none, required, or an object of the type "
        '"function" with the name of one'
    )


def _call(name: str, parameters: object) -> dict[str, Any]:
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(f"tools: the parameters of {name} must be a JSON schema, an object")
    # An id of its own keeps references of the parameters ("#/$defs/…") within them.
    arguments = {"$id": f"tool:{name}", **parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
