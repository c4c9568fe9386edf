"""The chat template of a model: messages to a prompt.

The template comes from the model's folder, is compiled once when it is loaded and runs in Jinja's immutable
sandbox. The environment is the one that Hugging Face templates are written for.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.frontend.messages import ChatMessage
from tidewheel.frontend.model_files import read_object, read_text


class ChatTemplate:
    """Rendering is thread-safe. `named_tokens` are those that templates refer to, such as `bos_token`."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from None
        self._named_tokens = dict(named_tokens)

    @classmethod
    def load(cls, folder: Path, named_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """None when the folder has no template. Raises `ConfigError` for one that does not compile."""
        source = _find(folder)
        return None if source is None else cls(source, named_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, up to where the assistant speaks. Raises `InvalidRequest` for what the template refuses."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._named_tokens
            )
        except Exception as error:  # whatever a template runs into, it ran into it on these messages
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}") from None


def _find(folder: Path) -> str | None:
    """`chat_template.jinja` before `chat_template.json` before `tokenizer_config.json`."""
    source = read_text(folder / "chat_template.jinja")
    if source is not None:
        return source
    for file in ("chat_template.json", "tokenizer_config.json"):
        value = read_object(folder / file).get("chat_template")
        if value is not None:
            return _default_of(value, folder / file)
    return None


def _default_of(value: object, path: Path) -> str | None:
    """A template, or the one named "default" of a list of named ones."""
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
    """`{% generation %}…{% endgeneration %}` marks what the assistant says, for training; here it is its content."""

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


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)
