"""Chat requests: messages, tools, and the template that turns them into a prompt."""

import datetime
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidewheel.errors import ConfigError, InvalidRequest, Unsupported
from tidewheel.frontend.coercion import expect, parse_json, show, to_text
from tidewheel.parameters import check_count
from tidewheel.regular_files import read_object, read_text

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_OPTIONS = 16
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_FUNCTION = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OPTION = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TEXT_KEYS = ("name", "reasoning_content", "tool_call_id")
_KEYS = frozenset({"role", "content", "tool_calls", *_TEXT_KEYS})
_PARTS = dict.fromkeys(("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"))
_FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

ChatMessage = dict[str, Any]
_EntryReader = Callable[[str, dict[str, Any]], dict[str, Any]]


class CallRules(msgspec.Struct, frozen=True, array_like=True):
    """Rules of an answer's calls, for a grammar."""

    names: list[str]  # functions that may be called
    strict: list[str]  # functions whose calls follow their schema, in every case if an answer must have a call
    must_call: bool
    is_parallel: bool  # several calls


class Conversation(msgspec.Struct, frozen=True, array_like=True):
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    options: dict[str, str | bool | int | float] = {}  # more variables of the template
    add_generation_prompt: bool = True
    escapes_special_tokens: bool = True  # in messages
    calls: CallRules | None = None  # None: the answer is free


def parse_conversation(data: str | bytes) -> Conversation:
    """Parse a list of messages, or an object of them and the other `_PARTS`.

    Newlines join the text parts of a message. Raise `InvalidRequest` or `Unsupported`.
    """
    given = parse_json(data, "messages")
    parts = given if isinstance(given, dict) else {"messages": given}
    if unknown := sorted(parts.keys() - _PARTS):
        raise InvalidRequest(f"messages has the unknown key {show(unknown[0])}: known are {', '.join(_PARTS)}")
    messages = parts.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f"messages is {show(messages)}: it must be a list of one message or more")
    tools = _list("tools", parts.get("tools"), MAX_TOOLS, _tool)
    names = Counter(tool["function"]["name"] for tool in tools)
    if len(names) < len(tools):
        raise InvalidRequest(f"tools has several functions of the name {names.most_common(1)[0][0]}: send one")
    conversation = Conversation(
        _list("messages", messages, MAX_MESSAGES, _message),
        tools or None,
        _options(parts.get("chat_template_kwargs")),
        calls=_call_rules(parts, list(names)),
    )
    try:
        msgspec.msgpack.encode(conversation)  # as it goes to the process for prompts
    except OverflowError:
        raise InvalidRequest("tools or messages hold an integer beyond 64 bits") from None
    except UnicodeEncodeError:
        raise InvalidRequest("tools, messages or their options hold a lone surrogate: not valid Unicode") from None
    except RecursionError:
        raise InvalidRequest("tools or messages are nested too deep") from None
    return conversation


def _list(name: str, value: object, limit: int, read: _EntryReader) -> list[dict[str, Any]]:
    if value is None:
        return []
    items = expect(name, value, list, "a list")
    check_count(name, len(items), limit)
    named = ((f"{name}[{index}]", item) for index, item in enumerate(items))
    return [read(path, expect(path, item, dict, "an object")) for path, item in named]


def _message(name: str, message: dict[str, Any]) -> ChatMessage:
    for key in message.keys() - _KEYS:
        if key == "function_call":
            raise Unsupported(f"{name}.function_call is set: use tool_calls")
        raise InvalidRequest(f"{name} has the unknown key {show(key)}: known are {', '.join(sorted(_KEYS))}")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(f"{name}.role is {show(role)}: it must be a name such as system, user or assistant")
    checked: ChatMessage = {"role": role}
    calls = _list(f"{name}.tool_calls", message.get("tool_calls"), MAX_TOOLS, _call)
    has_content = message.get("content") is not None or not calls
    checked["content"] = _content(f"{name}.content", message.get("content")) if has_content else ""
    if calls:
        checked["tool_calls"] = calls
    texts = {key: message[key] for key in _TEXT_KEYS if message.get(key) is not None}
    return checked | {key: to_text(f"{name}.{key}", text) for key, text in texts.items()}


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


def _call(name: str, call: dict[str, Any]) -> dict[str, Any]:
    function = _function(name, call, frozenset({"name", "arguments"}), frozenset({"id", "type", "function", "index"}))
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"{name}.function.arguments")
    arguments = expect(f"{name}.function.arguments", arguments, dict, "an object")
    call_id = {"id": to_text(f"{name}.id", call["id"])} if call.get("id") is not None else {}
    return {**call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tool(name: str, tool: dict[str, Any]) -> dict[str, Any]:
    function = _function(name, tool, _FUNCTION_KEYS, frozenset({"type", "function"}))
    if function.get("description") is not None:
        to_text(f"{name}.function.description", function["description"])
    if function.get("parameters") is not None:
        expect(f"{name}.function.parameters", function["parameters"], dict, "an object")
    if function.get("strict") is not None:
        expect(f"{name}.function.strict", function["strict"], bool, "true or false")
    kept = {key: value for key, value in function.items() if key != "strict" and value is not None}
    return {"type": "function", "function": kept}


def _call_rules(parts: dict[str, Any], names: list[str]) -> CallRules | None:
    choice = parts.get("tool_choice", "auto")
    is_parallel = expect("parallel_tool_calls", parts.get("parallel_tool_calls", True), bool, "true or false")
    strict = [tool["function"]["name"] for tool in parts.get("tools") or () if tool["function"].get("strict")]
    if choice == "auto":
        return CallRules(names, strict, must_call=False, is_parallel=is_parallel) if strict else None
    chosen = names if choice == "required" else choice
    if not isinstance(chosen, list) or not chosen or any(name not in names for name in chosen):
        raise InvalidRequest(
            f"tool_choice is {show(choice)}: it must be auto, required, or a list of names of functions in tools"
        )
    return CallRules(chosen, strict, must_call=True, is_parallel=is_parallel)


def _function(name: str, given: dict[str, Any], keys: frozenset[str], outer: frozenset[str]) -> dict[str, Any]:
    if given.get("type", "function") != "function":
        raise Unsupported(f"{name}.type is {show(given['type'])}: only functions are offered")
    function = expect(f"{name}.function", given.get("function"), dict, "an object")
    unknown = [f"{name}.{key}" for key in given.keys() - outer]
    unknown += [f"{name}.function.{key}" for key in function.keys() - keys]
    if unknown:
        raise InvalidRequest(f"{show(min(unknown))} is unknown: known are {', '.join(sorted(keys))}")
    if not isinstance(function.get("name"), str) or not _FUNCTION.fullmatch(function["name"]):
        raise InvalidRequest(
            f"{name}.function.name is {show(function.get('name'))}: it must be 1 to 64 letters, digits, _, . or -"
        )
    return function


def _options(value: object) -> dict[str, str | bool | int | float]:
    if value is None:
        return {}
    options = expect("chat_template_kwargs", value, dict, "an object")
    check_count("chat_template_kwargs", len(options), MAX_OPTIONS)
    for key, option in options.items():
        if not _OPTION.fullmatch(key) or key in _RESERVED or key.endswith("_token"):
            raise InvalidRequest(f"chat_template_kwargs has the key {show(key)}, which no request may set")
        if not isinstance(option, str | bool | int | float):
            raise InvalidRequest(f"chat_template_kwargs.{key} is {show(option)}: it must be text, number or boolean")
    return options


class ChatTemplate:
    """Chat template of a model, run in Jinja's immutable sandbox. Thread-safe."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # nested too deep, or no Python: Jinja leaves that to Python
            raise ConfigError(f"the chat template does not compile: {error}") from None
        self.source = source
        self._named_tokens = dict(named_tokens)

    @classmethod
    def load(cls, folder: Path, named_tokens: Mapping[str, str]) -> "ChatTemplate | None":
        """Return the template, if any. Raise `ConfigError`."""
        source = _find(folder)
        return None if source is None else cls(source, named_tokens)

    def render(self, conversation: Conversation) -> str:
        """Return the prompt. Raise `InvalidRequest`, or `MemoryError` beyond the process's limit."""
        try:
            return self._template.render(
                **conversation.options,
                **self._named_tokens,
                messages=conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt,
                documents=None,
            )
        except MemoryError:
            raise
        except Exception as error:  # templates may raise anything
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}") from None


def _find(folder: Path) -> str | None:
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
    """Jinja tag `{% generation %}`, which marks the assistant's part for training."""

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
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
    return environment


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return JSON without HTML escapes, unlike Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
