from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.frontend.conversation import Conversation
from tidewheel.frontend.model_files import read_object, read_text


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

    def render(self, conversation: Conversation) -> str:
        """Return the prompt. Raise `InvalidRequest` if the template refuses."""
        try:
            return self._render(conversation)
        except MemoryError:
            raise InvalidRequest("messages need too much memory in the model's chat template") from None
        except Exception as error:  # templates may raise anything
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}") from None

    def try_out(self, conversation: Conversation) -> None:
        """Raise `ConfigError` if the messages need too much memory. A template may refuse them."""
        try:
            self._render(conversation)
        except MemoryError:
            raise ConfigError(
                f"the chat template needs too much memory for {len(conversation.messages)} messages: "
                "use one that you trust"
            ) from None
        except Exception:  # a refusal
            return

    def _render(self, conversation: Conversation) -> str:
        return self._template.render(
            **conversation.options,
            **self._named_tokens,
            messages=conversation.messages,
            tools=conversation.tools,
            add_generation_prompt=conversation.add_generation_prompt,
            documents=None,
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
