"""Bodies of requests. The gateway reads the fields below; the backend reads, or refuses by name, all others."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeVar

import msgspec

from tidewheel.gateway.body_size import check_structure
from tidewheel.gateway.forced_calls import (
    call_schema,
    check_no_grammar,
    follows_grammar,
    forced_functions,
    parameters_name,
    without_strict,
)
from tidewheel.gateway.openai_errors import FieldMissing
from tidewheel_client.codec import OUTPUT_FLAGS
from tidewheel_client.errors import InvalidRequest, Unsupported

MAX_PROMPTS = 64  # of one request
MAX_FIELDS = 256
MAX_NAME_CHARS = 256
MAX_PARAMETER_BYTES = 1 << 18  # of all that the backend reads; it has the same limit
MOST_TOKENS = 2**31 - 1  # cut by the backend to what fits the context
MAX_REQUEST_ID_CHARS = 128


class _Refused(NamedTuple):
    """Field that is refused, unless its value requests nothing."""

    reason: str
    neutral: tuple[object, ...] = (False,)  # beside null


# Fields that the backend would refuse, or take, in words of its own.
_REFUSED = {
    "num_return_sequences": _Refused("set n"),
    "close_session": _Refused("a session ends by its time (session_ttl_s), or over gRPC"),
    "functions": _Refused("send tools", ([],)),
    "function_call": _Refused("send tools and tool_choice", ("none", "auto")),
    "store": _Refused("answers are not stored: send false, or leave it out"),
    "service_tier": _Refused("there are no tiers: send priority, 1 to 4", ("auto", "default", "flex")),
}
_MISSING = re.compile("Object missing required field `(.*)`")  # of msgspec, at the top


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM: in every chunk


class WithoutEffect(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that are accepted and change no answer, because OpenAI's clients send them by themselves."""

    user: str = ""
    metadata: dict[str, str] = {}
    prompt_cache_key: str = ""
    safety_identifier: str = ""
    store: bool = False
    service_tier: str = ""


class _Body(WithoutEffect, frozen=True, kw_only=True):
    model: str = ""  # empty: the only one
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    request_id: str = ""
    priority: int | None = None
    tenant: str | None = None
    session_id: str = ""
    return_token_ids: bool = False
    prompt_logprobs: int | None = None


class ChatBody(_Body, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    echo: bool = False
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class CompletionBody(_Body, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False


Body = TypeVar("Body", bound=msgspec.Struct)


class Ask(NamedTuple):
    """A request to the backend, or one for each prompt."""

    model: str
    prompts: list[dict[str, object]]  # tensor by name
    params: dict[str, object]
    request_id: str = ""  # empty: the gateway chooses
    n: int = 1
    session: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    top_logprobs: int | None = None  # None: no log-probabilities
    is_chat: bool = False
    has_echo: bool = False
    shows_prompt_logprobs: bool = False
    tools: frozenset[str] | None = None  # names of functions; None: no calls are looked for
    has_one_call: bool = False
    follows_grammar: bool = False
    schema_name: str = ""  # of a forced call, for messages
    traceparent: str = ""  # of the client's span, by W3C's header

    @property
    def size(self) -> int:
        """Return how many characters and token ids the prompts have."""
        return sum(
            len(value) for prompt in self.prompts for value in prompt.values() if isinstance(value, str | list)
        )


def parse(data: bytes) -> dict[str, Any]:
    """Return the fields that are not null. Raise `InvalidRequest`."""
    check_structure(data)
    try:
        fields = msgspec.json.decode(data)
    except RecursionError:
        raise InvalidRequest("the body is nested too deep") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    if len(fields) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(fields)} fields: at most {MAX_FIELDS} are allowed")
    if (longest := max(map(len, fields), default=0)) > MAX_NAME_CHARS:
        raise InvalidRequest(f"a field's name has {longest} characters: at most {MAX_NAME_CHARS} are allowed")
    return {key: value for key, value in fields.items() if value is not None}


def read_chat(fields: dict[str, Any]) -> Ask:
    """Raise `InvalidRequest` or `Unsupported`."""
    body, params = read_fields(fields, ChatBody)
    if body.echo:
        raise Unsupported("echo is set: a conversation is not returned; leave it out, or send false")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest(f"top_logprobs is {body.top_logprobs}, and logprobs is not true: set both, or none")
    params["max_tokens"] = _most_tokens(body)
    tools = body.tools if body.tool_choice != "none" else []
    names = frozenset(str(_name(tool)) for tool in tools) if tools else None
    schema_name = ""
    if body.tool_choice not in ("auto", "none"):
        check_no_grammar(params)
        functions = forced_functions(tools, body.tool_choice)
        params["structured_outputs"] = {"json": call_schema(functions)}
        names, schema_name = frozenset(functions), parameters_name(functions)
        tools = without_strict(tools)
    if tools:
        params.setdefault("skip_special_tokens", False)  # a mark of a call may be a special token
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompt = conversation(body.messages, tools, body.chat_template_kwargs)
    ask = _ask(body, params, [prompt], top_logprobs, is_chat=True)
    return ask._replace(tools=names, has_one_call=not body.parallel_tool_calls, schema_name=schema_name)


def _most_tokens(body: ChatBody) -> int:
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise InvalidRequest(f"max_tokens is {older}, and max_completion_tokens is {newer}: send one of them")
    return next((limit for limit in (older, newer) if limit is not None), MOST_TOKENS)


def read_completion(fields: dict[str, Any]) -> Ask:
    """Raise `InvalidRequest` or `Unsupported`."""
    body, params = read_fields(fields, CompletionBody)
    ask = _ask(body, params, prompts_of("prompt", body.prompt, MAX_PROMPTS), body.logprobs, is_chat=False)
    if not body.echo:
        return ask
    echo: dict[str, object] = {"echo": True}
    if body.logprobs is not None:
        echo["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return ask._replace(params=ask.params | echo, has_echo=True)


def read_fields(fields: dict[str, Any], kind: type[Body]) -> tuple[Body, dict[str, object]]:
    """Return the fields of `kind`, and the others. Raise `InvalidRequest` or `Unsupported`."""
    for name, refused in _REFUSED.items():
        if name in fields and fields[name] not in refused.neutral:
            raise Unsupported(f"{name} is set: {refused.reason}")
    names = kind.__struct_fields__
    others = {key: value for key, value in fields.items() if key not in names and key not in _REFUSED}
    if (size := len(msgspec.json.encode(others))) > MAX_PARAMETER_BYTES:
        raise InvalidRequest(f"the parameters have {size} bytes: at most {MAX_PARAMETER_BYTES} are allowed")
    if flags := OUTPUT_FLAGS.keys() & others.keys():
        raise InvalidRequest(f"unknown parameter {min(flags)!r}: OpenAI's API has no output flags")
    try:
        return msgspec.convert({key: fields[key] for key in names if key in fields}, kind), others
    except msgspec.ValidationError as error:
        if missing := _MISSING.fullmatch(str(error)):
            raise FieldMissing(f"{missing[1]} is missing: it is required") from None
        raise InvalidRequest(_place_first(str(error))) from None


def _place_first(message: str) -> str:
    """Turn "Expected `int` - at `$.n`" into "n: Expected `int`"."""
    what, _, place = message.partition(" - at `$.")
    return f"{place.rstrip('`')}: {what}" if place else what


def _ask(
    body: _Body,
    params: dict[str, object],
    prompts: list[dict[str, object]],
    top_logprobs: int | None,
    *,
    is_chat: bool,
) -> Ask:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is set, and stream is not true: set both, or none")
    if len(body.request_id) > MAX_REQUEST_ID_CHARS or not body.request_id.isprintable():
        raise InvalidRequest(f"request_id must have at most {MAX_REQUEST_ID_CHARS} characters that can be printed")
    options = {"n": body.n, "logprobs": top_logprobs, "tenant": body.tenant, "priority": body.priority}
    options |= {"session_id": body.session_id or None, "prompt_logprobs": body.prompt_logprobs}
    params |= {name: value for name, value in options.items() if value is not None}
    flags = {"return_token_ids": body.return_token_ids, "return_logprobs": top_logprobs is not None}
    return Ask(
        model=body.model,
        request_id=body.request_id,
        prompts=prompts,
        params=params | flags | {"return_perf_metrics": True},  # has the cached tokens
        n=body.n,
        session=body.session_id,
        stream=body.stream,
        stream_options=body.stream_options or StreamOptions(),
        top_logprobs=top_logprobs,
        is_chat=is_chat,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        follows_grammar=follows_grammar(params),
    )


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Leave out nulls, which clients send back with an answer, and give OpenAI's developer the older name."""
    kept = {key: value for key, value in message.items() if value is not None}
    return kept | {"role": "system"} if kept.get("role") == "developer" else kept


def conversation(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
) -> dict[str, object]:
    """Return the prompt that the backend takes."""
    messages = [_message(message) for message in messages]
    parts = {"tools": tools, "chat_template_kwargs": template_kwargs}
    # Messages come last, so that the text of a later turn begins with that of the turn before: see `routing.py`.
    given = {name: part for name, part in parts.items() if part} | {"messages": messages}
    return {"messages": msgspec.json.encode(given if given.keys() - {"messages"} else messages).decode()}


def _name(tool: dict[str, Any]) -> object:
    function = tool.get("function")  # the backend checks it
    return function.get("name") if isinstance(function, dict) else None


def prompts_of(name: str, prompt: str | list[str | int | list[int]], limit: int) -> list[dict[str, object]]:
    """Return the prompts of a field. Raise `InvalidRequest`."""
    if isinstance(prompt, str):
        return [{"text_input": prompt}]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [{"input_ids": prompt}]
    if not prompt or len(prompt) > limit:
        raise InvalidRequest(f"{name} has {len(prompt)} entries: it must have 1 to {limit}")
    if len(kinds) > 1:
        raise InvalidRequest(f"{name} mixes texts and token ids: send a text, texts, token ids, or lists of them")
    return [{"text_input" if isinstance(item, str) else "input_ids": item} for item in prompt]
