"""Texts around thoughts and calls of tools, as a family of models writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

NAME = r"(?P<name>[A-Za-z0-9_.-]{1,64})"
# The arguments follow.
OBJECT = rf'\s*\{{\s*"name"\s*:\s*"{NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
OBJECT_HEAD = re.compile(OBJECT)
NAMED_OBJECT = '{"name": "NAME", "arguments": '


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
