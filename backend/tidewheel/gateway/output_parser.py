"""Reasoning, content and calls of tools in a model's text, in every format of `tidewheel.tool_formats`."""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from tidewheel import tool_formats as formats
from tidewheel.tool_formats import CALL_MARKS, MORE_THOUGHT_MARKS, STRING, THOUGHT_MARKS, CallMark
from tidewheel_client.errors import InvalidRequest

Reasoning = Literal["tagged", "always", "off"]  # always: the template opens the tag

_CALLS = {**CALL_MARKS, "": (CallMark(formats.OBJECT_HEAD),)}  # by mark; empty: text that begins with {
_BARE_BEGINNING = re.compile(r'\s*\{\s*(?:$|"(?:$|n(?:$|a(?:$|m(?:$|e)))))')
_BETWEEN = " \t\r\n;,"
_CUT_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)|\A\s*(?:<function=)?([\w.-]+)', re.DOTALL)
_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
_decoder = json.JSONDecoder()
_NOTHING = "(?!)"  # matches no text
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}  # chat templates may write values as Python does
_GRAMMARS = ("json", "json_object", "regex", "choice", "grammar", "decoding", "decoding_guide_type")
_FIELDS = ("structured_outputs", "response_format", *(f"guided_{name}" for name in _GRAMMARS))

Tools = list[dict[str, Any]]
ToolChoice = str | dict[str, Any]
Functions = Mapping[str, Mapping[str, Any]]  # by name


class MarkFinder:
    """Finder of the first of some marks in a text that arrives in pieces."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, marks)) or _NOTHING)
        self._openers = re.compile("|".join({re.escape(mark[0]): None for mark in marks}) or _NOTHING)
        self._beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
        self._longest = max(map(len, self._beginnings), default=0)

    def split(self, text: str) -> tuple[str, str, str]:
        """Return the text before the first mark, the mark, and the rest. Without a mark, the rest may begin one."""
        if (found := self._pattern.search(text)) is not None:
            return text[: found.start()], found[0], text[found.end() :]
        for opener in self._openers.finditer(text, max(len(text) - self._longest, 0)):
            if text[opener.start() :] in self._beginnings:
                return text[: opener.start()], "", text[opener.start() :]
        return text, "", ""


_finder = cache(MarkFinder)


class TaggedArguments:
    """Reader of one call's arguments between tags. `end` is the mark after them, `parameters` their schema."""

    def __init__(self, tags: formats.Tags, end: str, parameters: object) -> None:
        self.has_ended = False
        self._tags = tags
        self._end = end
        self._schema: formats.Schema = parameters if isinstance(parameters, dict) else {}
        self._held = ""
        self._num_keys = 0
        self._types = STRING  # of the current value
        self._state: Callable[[], str | None] = self._between

    def read(self, text: str) -> tuple[str, str]:
        """Return the JSON read so far, and the unread text, which needs more text or follows the call."""
        self._held, pieces = text, []
        while not self.has_ended and (piece := self._state()) is not None:
            pieces.append(piece)
        return "".join(pieces), self._held

    def cut(self, rest: str) -> str:
        """Return the JSON of the unread `rest` of a call that was cut off."""
        return _escaped(rest) if self._state == self._in_string else ""

    # Each state is a method that returns the JSON of its part, or None if it needs more text.

    def _between(self) -> str | None:
        _, mark, self._held = _finder((self._tags.opening, self._end)).split(self._held)
        if mark == self._end:
            self.has_ended = True
            return "}" if self._num_keys else "{}"
        self._state = self._in_key if mark else self._between
        return "" if mark else None

    def _in_key(self) -> str | None:
        found = self._tags.key.match(self._held)
        if found is None:  # after the call's end, it never fits
            self._state = self._between if self._end in self._held else self._in_key
            return "" if self._end in self._held else None
        key, self._held = found[1].strip(), self._held[found.end() :]
        properties = self._schema.get("properties")
        self._types = formats.types_of(properties.get(key) if isinstance(properties, dict) else None, self._schema)
        self._num_keys += 1
        begin = f"{', ' if self._num_keys > 1 else '{'}{json.dumps(key, ensure_ascii=False)}: "
        if self._types != STRING:
            self._state = self._in_value
            return begin
        self._state = self._in_string
        return begin + '"'

    def _in_string(self) -> str | None:
        closing = self._tags.closing
        text, mark, self._held = _finder((self._tags.frame + closing, closing)).split(self._held)
        if mark:
            self._state = self._between
            return _escaped(text) + '"'
        return _escaped(text) or None

    def _in_value(self) -> str | None:
        raw, closing, rest = self._held.partition(self._tags.closing)
        if not closing:
            return None
        self._held, self._state = rest, self._between
        return as_json(raw.removesuffix(self._tags.frame), self._types)


def as_json(raw: str, types: frozenset[str]) -> str:
    """Return `raw` itself if it is JSON of one of the types, else as a JSON string."""
    text = _OF_PYTHON.get(raw.strip(), raw.strip())
    try:
        value = json.loads(text, parse_int=lambda _: 0, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(raw, ensure_ascii=False)
    is_quoted = isinstance(value, str) and "string" not in types
    fits = any(formats.has_type(value, name) for name in types - STRING)
    return text if is_quoted or fits else json.dumps(raw, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ToolCall(NamedTuple):
    id: str  # empty: `arguments` go on those of the call before
    name: str
    arguments: str  # JSON


class ParsedOutput(NamedTuple):
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()  # a first one without an id precedes `content` and `reasoning`

    def __add__(self, other: "ParsedOutput") -> "ParsedOutput":  # type: ignore[override]
        calls, more = self.calls, other.calls
        if calls and more and not more[0].id:
            joined = calls[-1]._replace(arguments=calls[-1].arguments + more[0].arguments)
            calls, more = (*calls[:-1], joined), more[1:]
        return ParsedOutput(self.content + other.content, self.reasoning + other.reasoning, calls + more)


class ExpectedCalls(NamedTuple):
    tools: Functions | None = None  # None: text of calls stays content
    must_call: bool = False  # after thoughts
    is_strict: bool = False  # calls outside marks begin with their name, as in the grammar
    is_parallel: bool = True  # else later calls are dropped


_State = Callable[[], ParsedOutput | None]
_CONTENT_MARKS = MarkFinder((*CALL_MARKS, *formats.SILENT_MARKS, *MORE_THOUGHT_MARKS))
_NO_MARKS = MarkFinder(())
_THOUGHT_ENDS = {end: MarkFinder((end,)) for end in (*THOUGHT_MARKS.values(), *MORE_THOUGHT_MARKS.values())}


class OutputParser:
    """Incremental parser of one sequence's text. It withholds text that may begin a mark."""

    def __init__(self, expected: ExpectedCalls, reasoning: Reasoning) -> None:
        self._expected = expected
        self._num_calls = 0
        self.was_cut = False  # the last call
        self._reasoning = reasoning
        self._held = ""
        self._mark = ""  # of the current call
        self._thought_end = THOUGHT_MARKS["<think>"]
        self._depth, self._is_string = 0, False  # within the arguments
        self._tagged: TaggedArguments | None = None  # of the current call
        self._state: _State = self._in_thought if reasoning == "always" else self._at_start

    def push(self, text: str) -> ParsedOutput:
        self._held += text
        output = ParsedOutput()
        while (part := self._state()) is not None:
            output += self._counted(part)
        return output

    def end(self) -> ParsedOutput:
        return self._counted(self._end())

    def _counted(self, part: ParsedOutput) -> ParsedOutput:
        calls = []
        for call in part.calls:
            self._num_calls += bool(call.id)
            if self._num_calls == 1 or self._expected.is_parallel:
                calls.append(call)
        return part._replace(calls=tuple(calls))

    def _end(self) -> ParsedOutput:
        held, self._held = self._held, ""
        if self._state == self._in_thought:
            return ParsedOutput(reasoning=held)
        if self._state in (self._in_arguments, self._in_tagged):
            self.was_cut = True
            held = self._tagged.cut(held) if self._tagged is not None else held
            return ParsedOutput(calls=(ToolCall("", "", held),) if held else ())
        if self._state == self._after_call:
            return ParsedOutput()
        if self._state == self._in_call:
            return self._parse_calls(held)
        return self._cut_call(held) if self._expected.must_call and not self._num_calls else ParsedOutput(held)

    # A state returns its part; None: it needs more text.

    def _at_start(self) -> ParsedOutput | None:
        text, marks = self._held.lstrip(), THOUGHT_MARKS if self._reasoning == "tagged" else {}
        if mark := next(filter(text.startswith, marks), ""):
            self._held, self._thought_end, self._state = text.removeprefix(mark), marks[mark], self._in_thought
        elif any(mark.startswith(text) for mark in marks):
            return None
        else:
            self._state = self._at_content
        return ParsedOutput()

    def _in_thought(self) -> ParsedOutput | None:
        thought, end, self._held = _THOUGHT_ENDS[self._thought_end].split(self._held)
        if end:
            self._state = partial(self._skip_space, self._at_content)
        return ParsedOutput(reasoning=thought) if thought or end else None

    def _at_content(self) -> ParsedOutput | None:
        text = self._held.lstrip()
        if self._expected.tools is not None and not text:
            return None
        self._state = self._in_call if self._expected.tools and text.startswith("{") else self._in_content
        return ParsedOutput()

    def _in_content(self) -> ParsedOutput | None:
        marks = _NO_MARKS if self._expected.tools is None else _CONTENT_MARKS
        content, mark, self._held = marks.split(self._held)
        if mark in MORE_THOUGHT_MARKS and self._reasoning == "off":
            content += mark
        elif mark in MORE_THOUGHT_MARKS:
            self._thought_end, self._state = MORE_THOUGHT_MARKS[mark], self._in_thought
        elif mark in CALL_MARKS:
            self._mark, self._state = mark, self._in_call
        return ParsedOutput(content) if content or mark else None

    def _in_call(self) -> ParsedOutput | None:
        for mark in _CALLS[self._mark]:
            head = mark.head.match(self._held)
            if head is not None and (self._mark or head["name"] in (self._expected.tools or ())):
                return self._begin_call(mark, head)
        if self._expected.is_strict and not self._mark and not _BARE_BEGINNING.match(self._held):
            self._state = self._in_content
            return ParsedOutput()
        closing = _CALLS[self._mark][0].closing
        if not closing or closing not in self._held:
            return None
        raw, _, self._held = self._held.partition(closing)
        self._state = partial(self._skip_space, self._in_content)
        return self._parse_calls(raw, closing)

    def _begin_call(self, mark: CallMark, head: re.Match[str]) -> ParsedOutput:
        name, self._held = head[head.lastgroup or "name"], self._held[head.end() :]
        self._state, self._tagged = self._in_arguments, None
        if mark.tags is not None:
            function = (self._expected.tools or {}).get(name, {})
            self._state = self._in_tagged
            self._tagged = TaggedArguments(mark.tags, mark.closing, function.get("parameters"))
        return ParsedOutput(calls=(ToolCall(_new_id(), name, ""),))

    def _in_tagged(self) -> ParsedOutput | None:
        assert self._tagged is not None
        piece, self._held = self._tagged.read(self._held)
        if self._tagged.has_ended:
            self._state = partial(self._skip_space, self._in_content)
        return ParsedOutput(calls=(ToolCall("", "", piece),)) if piece else None

    def _in_arguments(self) -> ParsedOutput | None:
        """Return the arguments so far, but not a backslash without the character that it escapes."""
        is_half = (len(self._held) - len(self._held.rstrip("\\"))) % 2
        piece = self._held[: len(self._held) - is_half]
        for match in _STRUCTURE.finditer(piece):
            if match[0] == '"':
                self._is_string = not self._is_string
            elif not self._is_string and match[0] in "{}[]":
                self._depth += 1 if match[0] in "{[" else -1
                if not self._depth:
                    piece, self._state = piece[: match.end()], self._after_call
                    break
        self._held = self._held[len(piece) :]
        return ParsedOutput(calls=(ToolCall("", "", piece),)) if piece else None

    def _after_call(self) -> ParsedOutput | None:
        if closing := _CALLS[self._mark][0].closing:
            if closing not in self._held:
                return None
            self._held, self._state = self._held.partition(closing)[2], partial(self._skip_space, self._in_content)
            return ParsedOutput()
        self._held = self._held.lstrip(_BETWEEN + "}]")
        if not self._held:
            return None
        self._state = self._in_call if self._held.startswith("{") else self._in_content
        return ParsedOutput()

    def _skip_space(self, state: _State) -> ParsedOutput | None:
        self._held = self._held.lstrip()
        if not self._held:
            return None
        self._state = state
        return ParsedOutput()

    def _parse_calls(self, raw: str, closing: str = "") -> ParsedOutput:
        """Return the calls of a text that does not begin with a name and an object of arguments."""
        try:
            calls = tuple(_read_calls(raw))
        except (ValueError, RecursionError):
            calls = ()
        if not calls and self._expected.must_call and not self._num_calls:
            return self._cut_call(raw)
        if not calls or (not self._mark and any(call.name not in (self._expected.tools or ()) for call in calls)):
            return ParsedOutput(self._mark + raw + closing)
        return ParsedOutput(calls=calls)

    def _cut_call(self, text: str) -> ParsedOutput:
        """Return a forced call that was cut off before its arguments, its name completed if only one fits."""
        self.was_cut = True
        found = _CUT_NAME.search(text)
        begin = (found[1] or found[2] or "") if found else ""
        fitting = [name for name in self._expected.tools or () if name.startswith(begin)]
        return ParsedOutput(calls=(ToolCall(_new_id(), fitting[0] if len(fitting) == 1 else begin, ""),))


def _read_calls(text: str) -> Iterator[ToolCall]:
    """Yield the tool calls of a text. Raise ValueError if it holds anything else."""
    rest = text.strip(_BETWEEN)
    while rest:
        value, end = _decoder.raw_decode(rest)
        yield from map(_call, value if isinstance(value, list) else [value])
        rest = rest[end:].lstrip(_BETWEEN)


def _call(item: Any) -> ToolCall:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise ValueError("no call")
    arguments = item.get("arguments", item.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(_new_id(), item["name"], arguments)


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
