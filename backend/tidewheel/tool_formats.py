"""Texts around thoughts and calls of tools, as families of models write them, and the format of a chat template."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Schema = Mapping[str, Any]  # of an argument: it says what the text of a string without quotes may be
_CLASSES: dict[str, Any] = {
    "string": str, "null": type(None), "boolean": bool, "integer": int, "number": (int, float),
    "array": list, "object": dict
}  # fmt: skip
STRING = frozenset({"string"})
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})


@dataclass(frozen=True, slots=True)
class Tags:
    """An argument: `opening`, its name, `key_end`, `frame`, a string or JSON, `frame`, `closing`, `separator`."""

    opening: str
    key_end: str
    key: re.Pattern[str]  # from the name to the value, with a group for the name
    closing: str
    separator: str = ""
    frame: str = ""


@dataclass(frozen=True, slots=True)
class CallMark:
    """Rest of a call whose mark has been read."""

    head: re.Pattern[str]  # from the mark to the arguments, with a group for the name
    closing: str = ""  # after the arguments; empty: the call ends with them
    tags: Tags | None = None  # None: the arguments are a JSON object


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opening`, a call, `separator`, a call, …, `closing`. A call is `begin`, arguments, `end`."""

    begin: str  # with NAME for the function's
    end: str = ""
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str = ""  # with which opening or begin begin; empty: text that begins with { is a call
    marks: dict[str, CallMark] = field(default_factory=dict)  # of calls
    silent: tuple[str, ...] = ()  # marks of no part of the answer
    thoughts: tuple[str, str] | None = None  # their marks; None: those of the template, if any
    more_thoughts: tuple[str, ...] = ()  # marks of thoughts within an answer
    after_thoughts: str = ""
    answer: str = ""  # before text that is no call
    preamble: tuple[str, str] = ("", "")  # around text before a call
    has_one_call: bool = False  # in an answer


_NAME = r"(?P<name>[A-Za-z0-9_.-]{1,64})"
# The arguments follow.
_OBJECT = rf'\s*\{{\s*"name"\s*:\s*"{_NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
OBJECT_HEAD = re.compile(_OBJECT)
_NAMED_OBJECT = '{"name": "NAME", "arguments": '

# Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_HERMES = ToolFormat(
    begin=f"{_CALL}\n{_NAMED_OBJECT}",
    end=f"}}\n{_CALL_END}",
    separator="\n",
    trigger=_CALL,
    marks={_CALL: CallMark(OBJECT_HEAD, _CALL_END)},
)

# Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, in lines.
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_QWEN_KEY = re.compile(r"([^<>\n]*)>(?:\n|(?=[^\n]))")
_QWEN_TAGS = Tags(_PARAMETER, ">", _QWEN_KEY, "</parameter>", separator="\n", frame="\n")
_QWEN3_CODER = ToolFormat(
    begin=f"{_CALL}\n{_FUNCTION}NAME>\n",
    end=f"</function>\n{_CALL_END}",
    separator="\n",
    trigger=_CALL,
    marks={_CALL: CallMark(re.compile(rf"\s*{_FUNCTION}{_NAME}>"), _CALL_END, _QWEN_TAGS)},
)

# GLM: `<tool_call>name`, `<arg_key>` and `<arg_value>` of arguments, `</tool_call>`; since 4.7 without newlines.
_KEY_END, _KEY_TOGETHER = "</arg_key>", "</arg_key><arg_value>"
_GLM_HEAD = re.compile(rf"\s*{_NAME}\s*(?=<arg_key>|{_CALL_END})")
_GLM_TAGS = Tags("<arg_key>", _KEY_TOGETHER, re.compile(rf"([^<]*){_KEY_END}\s*<arg_value>"), "</arg_value>")
_GLM_TAGS_IN_LINES = replace(_GLM_TAGS, key_end=f"{_KEY_END}\n<arg_value>", separator="\n")
_GLM_TOGETHER = ToolFormat(
    begin=f"{_CALL}NAME", end=_CALL_END, trigger=_CALL, marks={_CALL: CallMark(_GLM_HEAD, _CALL_END, _GLM_TAGS)}
)
_GLM_MARKS = {_CALL: CallMark(_GLM_HEAD, _CALL_END, _GLM_TAGS_IN_LINES)}
_GLM = replace(_GLM_TOGETHER, begin=f"{_CALL}NAME\n", separator="\n", marks=_GLM_MARKS)

# Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or in later models `[TOOL_CALLS]name[ARGS]{…}`.
_CALLS, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_BARE_NAME = rf"\s*{_NAME.replace('name', 'bare')}\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{{)"
_MISTRAL_MARKS = {_CALLS: CallMark(re.compile(rf"(?:\s*\[)?{_OBJECT}|{_BARE_NAME}"))}
_MISTRAL = ToolFormat(
    opening=f"{_CALLS}[",
    begin=_NAMED_OBJECT,
    end="}",
    separator=", ",
    closing="]",
    trigger=_CALLS,
    marks=_MISTRAL_MARKS,
)
_MISTRAL_NAMED = ToolFormat(begin=f"{_CALLS}NAME{_ARGUMENTS}", trigger=_CALLS, marks=_MISTRAL_MARKS)

# Llama 3: `{"name": …, "parameters": {…}}` as the whole answer, perhaps after `<|python_tag|>`.
_PYTHON_TAG = "<|python_tag|>"
_LLAMA = ToolFormat(
    begin=_NAMED_OBJECT.replace("arguments", "parameters"),
    end="}",
    marks={_PYTHON_TAG: CallMark(OBJECT_HEAD)},
    has_one_call=True,  # the template refuses conversations with several
)
# Models whose template knows no tools: the form is like Llama's.
_BARE = ToolFormat(begin=_NAMED_OBJECT, end="}", has_one_call=True)

# DeepSeek: calls between marks of their own, before V3.1 with a code block around the arguments.
_OPENING, _CLOSING, _BEGIN, _END, _SEPARATOR = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
_BLOCK = "```json"
_DEEPSEEK_HEAD = rf"\s*(?:function{_SEPARATOR})?{_NAME}(?:{_SEPARATOR}|\s*{_BLOCK}\n)\s*(?=\{{)"
_DEEPSEEK = ToolFormat(
    opening=_OPENING,
    begin=f"{_BEGIN}NAME{_SEPARATOR}",
    end=_END,
    closing=_CLOSING,
    trigger=_OPENING,
    marks={_BEGIN: CallMark(re.compile(_DEEPSEEK_HEAD), _END)},
    silent=(_OPENING, _CLOSING),
)
_DEEPSEEK_BLOCK = replace(
    _DEEPSEEK, begin=f"{_BEGIN}function{_SEPARATOR}NAME\n{_BLOCK}\n", end=f"\n```{_END}", separator="\n"
)

# GPT-OSS: messages on channels. A call is the last message of an answer: `<|call|>` ends the text.
_CHANNEL, _MESSAGE, _MESSAGE_END, _NEXT = "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant"
_ANALYSIS, _FINAL, _COMMENTARY = (f"{_CHANNEL}{name}{_MESSAGE}" for name in ("analysis", "final", "commentary"))
_TO = " to=functions."
_CALL_TO = f"{_CHANNEL}commentary{_TO}"
_HARMONY_MARK = CallMark(re.compile(rf"{_NAME}(?:(?!<\|message\|>).){{,200}}<\|message\|>\s*(?=\{{)", re.DOTALL))
_BEFORE = ("", _NEXT, _MESSAGE_END + _NEXT)  # a message
_HARMONY = ToolFormat(
    begin=f"{_CALL_TO}NAME <|constrain|>json{_MESSAGE}",
    trigger=_CALL_TO,
    marks={before + form: _HARMONY_MARK for before in _BEFORE for form in (_CALL_TO, _TO) if before + form != _TO},
    silent=tuple(before + form for before in _BEFORE for form in (_FINAL, _COMMENTARY)),
    thoughts=(_ANALYSIS, _MESSAGE_END),
    more_thoughts=tuple(before + _ANALYSIS for before in _BEFORE),
    after_thoughts=_NEXT,
    answer=_FINAL,
    preamble=(_COMMENTARY, _MESSAGE_END + _NEXT),
    has_one_call=True,
)

# Format by texts that its templates have; the first that fits.
_BY_TEXTS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    ((_CHANNEL,), _HARMONY),
    ((_OPENING, _BLOCK), _DEEPSEEK_BLOCK),
    ((_OPENING,), _DEEPSEEK),
    ((_CALLS, _ARGUMENTS), _MISTRAL_NAMED),
    ((_CALLS,), _MISTRAL),
    ((_KEY_TOGETHER,), _GLM_TOGETHER),
    ((_KEY_END,), _GLM),
    ((_FUNCTION, _PARAMETER), _QWEN3_CODER),
    ((_CALL,), _HERMES),
    (("<|start_header_id|>",), _LLAMA),
    ((_PYTHON_TAG,), _LLAMA),
)
_FORMATS = (*(each for _, each in _BY_TEXTS), _BARE)
_RESTS = tuple({(mark, rest): None for each in _FORMATS for mark, rest in each.marks.items()})
# What may follow a mark: the rests of one mark have the same closing.
CALL_MARKS = {mark: tuple(rest for other, rest in _RESTS if other == mark) for mark, _ in _RESTS}
SILENT_MARKS = tuple({mark: None for each in _FORMATS for mark in each.silent})
# Marks around thoughts: at the beginning of an answer, and within.
THOUGHT_MARKS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
THOUGHT_MARKS |= dict(each.thoughts for each in _FORMATS if each.thoughts)
MORE_THOUGHT_MARKS = {mark: each.thoughts[1] for each in _FORMATS if each.thoughts for mark in each.more_thoughts}


def format_of(template: str) -> ToolFormat:
    """Return the format of a model's calls."""
    return next((each for texts, each in _BY_TEXTS if all(text in template for text in texts)), _BARE)


def thoughts_of(template: str, chosen: ToolFormat) -> tuple[str, str] | None:
    """Return the marks of a model's thoughts; None if it has none."""
    found = (pair for pair in THOUGHT_MARKS.items() if pair[1] in template and chosen.thoughts is None)
    return chosen.thoughts or next(found, None)


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
