"""Reasoning, content and calls of tools in a model's text. Three ways to mark calls are read, whatever the model:

Hermes, Qwen   <tool_call>{"name": …, "arguments": {…}}</tool_call>
Mistral        [TOOL_CALLS][{"name": …, "arguments": {…}}], or [TOOL_CALLS]name[ARGS]{…}
Llama 3        {"name": …, "parameters": {…}} as the whole text, perhaps after <|python_tag|>
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from tidewheel_client.errors import InvalidRequest

Reasoning = Literal["tagged", "always", "off"]  # always: the template opens the tag

_THINK, _END_THINK = "<think>", "</think>"
_MISTRAL = "[TOOL_CALLS]"
_CLOSINGS = {"<tool_call>": "</tool_call>", _MISTRAL: "", "<|python_tag|>": ""}  # empty: up to the end
_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN = re.compile(r"(?:[\s;,]|\[TOOL_CALLS\])*")
# Beginning of a forced call: the name, perhaps cut, and the arguments.
_CUT = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)(?:"\s*,\s*"arguments"\s*:\s*(.*))?', re.DOTALL)
_decoder = json.JSONDecoder()
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_GRAMMARS = ("json", "json_object", "regex", "choice", "grammar", "decoding", "decoding_guide_type")
_FIELDS = ("structured_outputs", "response_format", *(f"guided_{name}" for name in _GRAMMARS))

Tools = list[dict[str, Any]]
ToolChoice = str | dict[str, Any]
Functions = Mapping[str, Mapping[str, Any]]  # by name


class ToolCall(NamedTuple):
    id: str
    name: str
    arguments: str  # JSON


class ParsedOutput(NamedTuple):
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: ParsedOutput) -> ParsedOutput:  # type: ignore[override]
        return ParsedOutput(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)


_State = Callable[[], ParsedOutput | None]


class OutputParser:
    """Incremental parser of one sequence's text. It withholds text that may begin a mark."""

    def __init__(self, tools: frozenset[str] | None, reasoning: Reasoning, *, is_forced: bool = False) -> None:
        """`tools`: function names; None: text of calls stays content. `is_forced`: the whole text is one call."""
        self._tools = tools
        self._is_forced = is_forced
        self.was_cut = False  # the forced call
        self._reasoning = reasoning
        self._held = ""
        self._opening = ""  # mark of the current call
        self._state: _State = self._in_thought if reasoning == "always" else self._at_start
        if is_forced:
            self._state = self._in_call

    def push(self, text: str) -> ParsedOutput:
        self._held += text
        output = ParsedOutput()
        while (part := self._state()) is not None:
            output += part
        return output

    def end(self) -> ParsedOutput:
        held, self._held = self._held, ""
        if self._state == self._in_thought:
            return ParsedOutput(reasoning=held)
        if self._state == self._in_call:
            return self._parse_calls(held)
        return ParsedOutput(held)

    # A state returns its part; None: it needs more text.

    def _at_start(self) -> ParsedOutput | None:
        text = self._held.lstrip()
        if self._reasoning == "tagged" and (not text or _THINK.startswith(text)) and text != _THINK:
            return None
        if self._reasoning == "tagged" and text.startswith(_THINK):
            self._held, self._state = text.removeprefix(_THINK), self._in_thought
        else:
            self._state = self._at_content
        return ParsedOutput()

    def _in_thought(self) -> ParsedOutput | None:
        thought, end, rest = self._held.partition(_END_THINK)
        if end:
            self._held, self._state = rest, partial(self._skip_space, self._at_content)
            return ParsedOutput(reasoning=thought)
        text = self._take_certain((_END_THINK,))
        return ParsedOutput(reasoning=text) if text else None

    def _at_content(self) -> ParsedOutput | None:
        text = self._held.lstrip()
        if self._tools is not None and not text:
            return None
        self._state = self._in_call if self._tools and text.startswith("{") else self._in_content
        return ParsedOutput()

    def _in_content(self) -> ParsedOutput | None:
        marks = () if self._tools is None else tuple(_CLOSINGS)
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            text = self._take_certain(marks)
            return ParsedOutput(text) if text else None
        at, self._opening = min(found)
        content, self._held = self._held[:at], self._held[at + len(self._opening) :]
        self._state = self._in_call
        return ParsedOutput(content)

    def _in_call(self) -> ParsedOutput | None:
        closing = _CLOSINGS.get(self._opening, "")
        if not closing or closing not in self._held:
            return None
        raw, _, self._held = self._held.partition(closing)
        self._state = partial(self._skip_space, self._in_content)
        return self._parse_calls(raw, closing)

    def _skip_space(self, state: _State) -> ParsedOutput | None:
        self._held = self._held.lstrip()
        if not self._held:
            return None
        self._state = state
        return ParsedOutput()

    def _take_certain(self, marks: tuple[str, ...]) -> str:
        lengths = range(min(len(self._held), max(map(len, marks), default=1) - 1), 0, -1)
        num_held = next((n for n in lengths if any(mark.startswith(self._held[-n:]) for mark in marks)), 0)
        num_taken = len(self._held) - num_held
        text, self._held = self._held[:num_taken], self._held[num_taken:]
        return text

    def _parse_calls(self, raw: str, closing: str = "") -> ParsedOutput:
        try:
            calls = tuple(_read_calls(raw))
        except (ValueError, RecursionError):
            calls = ()
        if self._is_forced:
            self.was_cut = not calls
            return ParsedOutput(calls=calls or (_cut_call(raw, self._tools or frozenset()),))
        if not calls or (not self._opening and any(call.name not in (self._tools or ()) for call in calls)):
            return ParsedOutput(self._opening + raw + closing)
        return ParsedOutput(calls=calls)


def _read_calls(text: str) -> Iterator[ToolCall]:
    """Yield the tool calls of a text. Raise ValueError if it holds anything else."""
    position = _skip(text, 0)
    while position < len(text):
        if (named := _NAME.match(text, position)) is not None:
            arguments, position = _decoder.raw_decode(text, named.end())
            yield _call({"name": named[1], "arguments": arguments})
        else:
            value, position = _decoder.raw_decode(text, position)
            for item in value if isinstance(value, list) else [value]:
                yield _call(item)
        position = _skip(text, position)


def _skip(text: str, position: int) -> int:
    match = _BETWEEN.match(text, position)
    return position if match is None else match.end()


def _call(item: Any) -> ToolCall:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise ValueError("no call")
    arguments = item.get("arguments", item.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(_new_id(), item["name"], arguments)


def _cut_call(text: str, names: frozenset[str]) -> ToolCall:
    """Return a forced call that was cut off, its name completed if only one fits."""
    found = _CUT.match(text)
    begin, arguments = (found[1], found[2] or "") if found else ("", "")
    fitting = [name for name in names if json.dumps(name, ensure_ascii=False)[1:-1].startswith(begin)]
    return ToolCall(_new_id(), fitting[0] if len(fitting) == 1 else begin, arguments)


def _new_id() -> str:
    return secrets.token_hex(5)[:9]  # as Mistral's templates want


def functions_of(tools: Tools) -> Functions:
    """Return the functions by name, without malformed ones, which the backend refuses."""
    functions = [tool.get("function") for tool in tools]
    return {str(one["name"]): one for one in functions if isinstance(one, Mapping) and "name" in one}


def allowed_tools(tools: Tools, choice: ToolChoice) -> tuple[Tools, ToolChoice]:
    """Return the tools that OpenAI's `allowed_tools` names, else all, and the choice. Raise `InvalidRequest`."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    match choice.get("allowed_tools"):
        case {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed}:
            names = set(map(_chosen_name, allowed))
            if missing := sorted(names - functions_of(tools).keys()):
                raise InvalidRequest(f"tool_choice allows {missing[0][:80]!r}: tools has no such function")
            return [tool for tool in tools if functions_of([tool]).keys() <= names], mode
    raise InvalidRequest("tool_choice is allowed_tools: it must have a mode, auto or required, and a list of tools")


def forced_functions(known: Functions, tool_choice: ToolChoice, params: Mapping[str, object]) -> Functions:
    """Return the functions, one of which must be called. Raise `InvalidRequest`, also if `params` have a grammar."""
    if name := grammar_field(params):
        raise InvalidRequest(f"tool_choice forces a call, and {name} is set: send one of them")
    names = list(known) if tool_choice == "required" else [_chosen_name(tool_choice)]
    if not known or names[0] not in known:
        wanted = names[0] if names else "a tool"
        raise InvalidRequest(f"tool_choice forces a call of {wanted}: tools has no such function")
    return {name: known[name] for name in names}


def call_grammar(functions: Functions) -> dict[str, Any]:
    """Return the grammar of `{"name": …, "arguments": {…}}`, the form of a forced call for all models."""
    calls = [_call_schema(name, function.get("parameters") or _NO_PARAMETERS) for name, function in functions.items()]
    return {"json": {"anyOf": calls}}


def grammar_field(params: Mapping[str, object]) -> str:
    """Return the first parameter that asks for a grammar; empty without one."""
    return next((name for name in _FIELDS if _is_grammar(name, params.get(name))), "")


def _is_grammar(name: str, value: object) -> bool:
    if name == "guided_json":
        return value is not None  # {} is a schema too
    members = value.values() if isinstance(value, Mapping) else [value]
    return bool(value) and value != {"type": "text"} and any(member is not None for member in members)


def _chosen_name(tool_choice: ToolChoice) -> str:
    match tool_choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidRequest(
        f"tool_choice is {str(tool_choice)[:80]!r}: it must be auto, none, required, or an object of the type "
        '"function" with the name of one, or "allowed_tools" with some'
    )


def without_strict(tools: Tools) -> Tools:
    """Return the tools without `strict`: a forced call follows its schema."""
    functions = [tool.get("function") for tool in tools]
    bare = [{k: v for k, v in one.items() if k != "strict"} if isinstance(one, dict) else one for one in functions]
    return [{**tool, "function": function} for tool, function in zip(tools, bare, strict=True)]


def _call_schema(name: str, parameters: object) -> dict[str, Any]:
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(f"tools: the parameters of {name} must be a JSON schema, an object")
    # The $id keeps the parameters' references ("#/$defs/…") within them.
    arguments = {"$id": f"tool:{name}", **parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
