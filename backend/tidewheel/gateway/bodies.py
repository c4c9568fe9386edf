"""Bodies of requests. The gateway reads the fields below; the backend reads, or refuses by name, all others."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec

from tidewheel.gateway.forced_calls import call_schema, follows_grammar, without_strict
from tidewheel_client.codec import OUTPUT_FLAGS
from tidewheel_client.request_errors import InvalidRequest, Unsupported

MAX_PROMPTS = 64  # of one request
MOST_TOKENS = 2**31 - 1  # cut by the backend to what fits the context
MAX_REQUEST_ID_CHARS = 128

_REFUSED = {
    "echo": "the prompt is not returned: leave it out, or send false",
    "num_return_sequences": "set n",
    "close_session": "a session ends by its time (session_ttl_s), or over gRPC",
}
_NOTHING = (None, False)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM: in every chunk


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""  # empty: the only one
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    request_id: str = ""
    priority: int | None = None
    tenant: str | None = None
    session_id: str = ""
    return_token_ids: bool = False


class ChatBody(_Body, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class CompletionBody(_Body, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


Body = TypeVar("Body", bound=_Body)


class Ask(NamedTuple):
    """A request to the backend, or one for each prompt."""

    model: str
    request_id: str  # empty: the gateway chooses
    prompts: list[dict[str, object]]  # tensor by name
    params: dict[str, object]
    n: int
    session: str
    stream: bool
    stream_options: StreamOptions
    top_logprobs: int | None  # None: no log-probabilities
    is_chat: bool
    tools: frozenset[str] | None = None  # names of functions; None: no calls are looked for
    has_one_call: bool = False
    follows_grammar: bool = False


def parse(data: bytes) -> dict[str, Any]:
    """Return the fields that are not null. Raise `InvalidRequest`."""
    try:
        fields = msgspec.json.decode(data)
    except RecursionError:
        raise InvalidRequest("the body is nested too deep") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return {key: value for key, value in fields.items() if value is not None}


def read_chat(fields: dict[str, Any]) -> Ask:
    """Raise `InvalidRequest` or `Unsupported`."""
    body, params = _read(fields, ChatBody)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest(f"top_logprobs is {body.top_logprobs}, and logprobs is not true: set both, or none")
    limits = {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    params |= limits or {"max_tokens": MOST_TOKENS}
    tools = body.tools if body.tool_choice != "none" else []
    if body.tool_choice not in ("auto", "none"):
        params["structured_outputs"] = {"json": call_schema(tools, body.tool_choice)}
        tools = without_strict(tools)
    if tools:
        params.setdefault("skip_special_tokens", False)  # a mark of a call may be a special token
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    ask = _ask(body, params, [{"messages": _conversation(body, tools)}], top_logprobs, is_chat=True)
    names = frozenset(str(_name(tool)) for tool in tools) if tools else None
    return ask._replace(tools=names, has_one_call=not body.parallel_tool_calls)


def read_completion(fields: dict[str, Any]) -> Ask:
    """Raise `InvalidRequest` or `Unsupported`."""
    body, params = _read(fields, CompletionBody)
    return _ask(body, params, _prompts(body.prompt), body.logprobs, is_chat=False)


def _read(fields: dict[str, Any], kind: type[Body]) -> tuple[Body, dict[str, object]]:
    """Return the fields of `kind`, and the others."""
    for name, reason in _REFUSED.items():
        if fields.get(name) not in _NOTHING:
            raise Unsupported(f"{name} is set: {reason}")
    names = kind.__struct_fields__
    others = {key: value for key, value in fields.items() if key not in names and key not in _REFUSED}
    if flags := OUTPUT_FLAGS.keys() & others.keys():
        raise InvalidRequest(f"unknown parameter {min(flags)!r}: OpenAI's API has no output flags")
    try:
        return msgspec.convert({key: fields[key] for key in names if key in fields}, kind), others
    except msgspec.ValidationError as error:
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
    options |= {"session_id": body.session_id or None}
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
        follows_grammar=follows_grammar(params),
    )


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Leave out nulls, which clients send back with an answer, and give OpenAI's developer the older name."""
    kept = {key: value for key, value in message.items() if value is not None}
    return kept | {"role": "system"} if kept.get("role") == "developer" else kept


def _conversation(body: ChatBody, tools: list[dict[str, Any]]) -> str:
    """Return what the backend takes as `messages`."""
    messages = [_message(message) for message in body.messages]
    parts = {"messages": messages, "tools": tools, "chat_template_kwargs": body.chat_template_kwargs}
    given = {name: part for name, part in parts.items() if part}
    return msgspec.json.encode(given if given.keys() - {"messages"} else messages).decode()


def _name(tool: dict[str, Any]) -> object:
    function = tool.get("function")  # the backend checks it
    return function.get("name") if isinstance(function, dict) else None


def _prompts(prompt: str | list[str | int | list[int]]) -> list[dict[str, object]]:
    if isinstance(prompt, str):
        return [{"text_input": prompt}]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [{"input_ids": prompt}]
    if not prompt or len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(prompt)} entries: it must have 1 to {MAX_PROMPTS}")
    if any(isinstance(item, int) for item in prompt) or len({type(item) for item in prompt}) > 1:
        raise InvalidRequest("prompt mixes texts and token ids: send a text, texts, token ids, or lists of them")
    return [{"text_input" if isinstance(item, str) else "input_ids": item} for item in prompt]
