"""Chat messages as a client sends them, checked: a list of roles and texts."""

from __future__ import annotations

import re

from tidewheel.errors import InvalidRequest, Unsupported
from tidewheel.frontend.coercion import show, to_text
from tidewheel.frontend.strict_json import parse_json

MAX_MESSAGES = 4096
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_TEXT_KEYS = frozenset({"role", "content", "name"})
_TOOL_KEYS = frozenset({"tool_calls", "tool_call_id", "function_call"})

ChatMessage = dict[str, str]


def parse_messages(data: str | bytes) -> list[ChatMessage]:
    """`[{"role": …, "content": text or [{"type": "text", "text": …}, …]}, …]`; parts are joined by newlines.

    Raises `InvalidRequest` that names the message and what is wrong with it.
    """
    messages = parse_json(data, "messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f"messages is {show(messages)}: it must be a list of one message or more")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(messages)} entries: at most {MAX_MESSAGES} are allowed")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, message: object) -> ChatMessage:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{name} is {show(message)}: it must be an object with role and content")
    for key in message.keys() - _TEXT_KEYS:
        if key in _TOOL_KEYS:
            raise Unsupported(f"{name}.{key} is set: tool calls are not offered")
        raise InvalidRequest(f"{name} has the unknown key {show(key)}: known are {', '.join(sorted(_TEXT_KEYS))}")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(f"{name}.role is {show(role)}: it must be a name such as system, user or assistant")
    checked = {"role": role, "content": _content(f"{name}.content", message.get("content"))}
    if message.get("name") is not None:
        checked["name"] = to_text(f"{name}.name", message["name"])
    return checked


def _content(name: str, content: object) -> str:
    if isinstance(content, list):
        return "\n".join(_part(f"{name}[{index}]", part) for index, part in enumerate(content))
    return to_text(name, content)


def _part(name: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(f'{name} is {show(part)}: it must be {{"type": "text", "text": …}}')
    if kind != "text":
        raise Unsupported(f"{name}.type is {show(kind)}: only text is offered")
    return to_text(f"{name}.text", part.get("text"))
