from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidewheel.errors import ConfigError, InvalidRequest, Unsupported
from tidewheel.frontend.coercion import parse_json, show, to_text
from tidewheel.frontend.model_files import read_object, read_text

MAX_MESSAGES = 4096
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_TEXT_KEYS = frozenset({"role", "content", "name"})
_TOOL_KEYS = frozenset({"tool_calls", "tool_call_id", "function_call"})

ChatMessage = dict[str, str]


def parse_messages(data: str | bytes) -> list[ChatMessage]:
    """Parse `[{"role": …, "content": text or [{"type": "text", "text": …}, …]}, …]`; newlines join parts.

    Raise `InvalidRequest` or `Unsupported`.
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


class ChatTemplate:
    """Chat template of a model, in Jinja's immutable sandbox with what Hugging Face templates use. Thread-safe."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # nested too deep, or no Python: Jinja leaves that to Python
            raise ConfigError(f"the chat template does not compile: {error}") from None
        self._named_tokens = dict(named_tokens)

    @classmethod
    def load(cls, folder: Path, named_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """Return None without a template. Raise `ConfigError`."""
        source = _find(folder)
        return None if source is None else cls(source, named_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the prompt. Raise `InvalidRequest` if the template refuses."""
        try:
            return self._render(messages)
        except MemoryError:
            raise InvalidRequest("messages need too much memory in the model's chat template") from None
        except Exception as error:  # templates may raise anything
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}") from None

    def try_out(self, messages: Sequence[ChatMessage]) -> None:
        """Raise `ConfigError` if the messages need too much memory. A template may refuse them."""
        try:
            self._render(messages)
        except MemoryError:
            raise ConfigError(
                f"the chat template needs too much memory for {len(messages)} messages: use one that you trust"
            ) from None
        except Exception:  # a refusal
            return

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        return self._template.render(
            messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._named_tokens
        )


def _find(folder: Path) -> str | None:
    """Read `chat_template.jinja`, else `chat_template.json`, else `tokenizer_config.json`."""
    source = read_text(folder / "chat_template.jinja")
    if source is not None:
        return source
    for file in ("chat_template.json", "tokenizer_config.json"):
        value = read_object(folder / file).get("chat_template")
        if value is not None:
            return _default_of(value, folder / file)
    return None


def _default_of(value: object, path: Path) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        sources = [item.get("template") for item in value if item.get("name") == "default"]
        if not sources:
            return None
        if isinstance(sources[0], str):
            return sources[0]
    raise ConfigError(f"{path}: chat_template must be text, or a list of objects with name and template")


class _Generation(Extension):
    """Extension that passes `{% generation %}`, which marks the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Escape nothing for HTML, unlike Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)
