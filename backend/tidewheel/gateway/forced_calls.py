"""Calls of tools that a client forces, as a JSON schema that the answer follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tidewheel_client.errors import InvalidRequest

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_GRAMMARS = ("json", "json_object", "regex", "choice", "grammar", "decoding", "decoding_guide_type")
_FIELDS = ("structured_outputs", "response_format", *(f"guided_{name}" for name in _GRAMMARS))
_MOST_CHARS = 200  # of names in a message

Tools = list[dict[str, Any]]
ToolChoice = str | dict[str, Any]


class ForcedCall(NamedTuple):
    """A call that the answer consists of."""

    grammar: dict[str, Any]  # value of `structured_outputs`
    tools: Tools  # without `strict`: the call follows its schema
    names: frozenset[str]  # functions, one of which is called
    schema_name: str  # for messages


def force_call(tools: Tools, tool_choice: ToolChoice, params: Mapping[str, object]) -> ForcedCall:
    """Return the call that `tool_choice` names. Raise `InvalidRequest`, also for another grammar in `params`.

    The answer is `{"name": …, "arguments": {…}}`, whatever the model.
    """
    for name in _FIELDS:
        if _is_grammar(name, params.get(name)):
            raise InvalidRequest(f"tool_choice forces a call, and {name} is set: send one of them")
    functions = _forced_functions(tools, tool_choice)
    calls = [_call(name, function.get("parameters") or _NO_PARAMETERS) for name, function in functions.items()]
    joined = " or ".join(functions)
    schema_name = f"tools: parameters of {joined if len(joined) <= _MOST_CHARS else 'a function'}"
    return ForcedCall({"json": {"anyOf": calls}}, _without_strict(tools), frozenset(functions), schema_name)


def _is_grammar(name: str, value: object) -> bool:
    if name == "guided_json":
        return value is not None  # {} is a schema too
    members = value.values() if isinstance(value, Mapping) else [value]
    return bool(value) and value != {"type": "text"} and any(member is not None for member in members)


def _forced_functions(tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice) -> dict[str, Mapping[str, Any]]:
    """Return the chosen function, or all for "required"."""
    functions = [tool.get("function") for tool in tools]
    known = {str(one["name"]): one for one in functions if isinstance(one, Mapping) and "name" in one}
    names = list(known) if tool_choice == "required" else [_chosen_name(tool_choice)]
    if not known or names[0] not in known:
        wanted = names[0] if names else "a tool"
        raise InvalidRequest(f"tool_choice forces a call of {wanted}: tools has no such function")
    return {name: known[name] for name in names}


def _chosen_name(tool_choice: ToolChoice) -> str:
    match tool_choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidRequest(
        f"tool_choice is {str(tool_choice)[:80]!r}: it must be auto, none, required, or an object of the type "
        '"function" with the name of one'
    )


def _without_strict(tools: Tools) -> Tools:
    functions = [tool.get("function") for tool in tools]
    bare = [{k: v for k, v in one.items() if k != "strict"} if isinstance(one, dict) else one for one in functions]
    return [{**tool, "function": function} for tool, function in zip(tools, bare, strict=True)]


def _call(name: str, parameters: object) -> dict[str, Any]:
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(f"tools: the parameters of {name} must be a JSON schema, an object")
    # The $id keeps references of the parameters ("#/$defs/…") within them.
    arguments = {"$id": f"tool:{name}", **parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
