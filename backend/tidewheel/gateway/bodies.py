"""Bodies of requests. The backend reads or refuses fields that are not listed here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from tidewheel.gateway.errors import FieldMissing
from tidewheel.gateway.output_parser import force_call
from tidewheel.gateway.upstream_request import StreamOptions, UpstreamRequest
from tidewheel_client.codec import OUTPUT_FLAGS
from tidewheel_client.errors import InvalidRequest, Unsupported

MAX_PROMPTS = 64
MAX_INPUTS = 2048  # of embeddings, as OpenAI's
MAX_FIELDS = 256
MAX_NAME_CHARS = 256
MAX_PARAMETER_BYTES = 1 << 18  # the backend's limit
MOST_TOKENS = 2**31 - 1  # the backend cuts it to the context
MAX_REQUEST_ID_CHARS = 128
# Together some 50 ms of parsing.
MAX_CONTAINERS = 1 << 15  # lists, objects and keys
MAX_ITEMS = 1 << 18
_SMALL = 1 << 14  # bytes that need no check
_PIECE = 1 << 18  # bytes; other threads run between pieces
_ESCAPE = re.compile(rb"\\*[^\\]?")
_MISSING = re.compile("Object missing required field `(.*)`")  # by msgspec

Prompt = dict[str, object]  # tensors by name
Fields = dict[str, Any]

# --- fields ------------------------------------------------------------------------------------------------------


class _Refused(NamedTuple):
    """Field that is refused, unless its value requests nothing."""

    reason: str
    neutral: tuple[object, ...] = (False,)  # beside null


_REFUSED = {
    "num_return_sequences": _Refused("set n"),
    "close_session": _Refused("a session ends by its time (session_ttl_s), or over gRPC"),
    "functions": _Refused("send tools", ([],)),
    "function_call": _Refused("send tools and tool_choice", ("none", "auto")),
    "store": _Refused("answers are not stored: send false, or leave it out"),
    "service_tier": _Refused("there are no tiers: send priority, 1 to 4", ("auto", "default", "flex")),
}


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""  # empty: the only one


class _OpenAIBody(_Body, frozen=True, kw_only=True):
    """Fields without effect that OpenAI's clients send unasked."""

    user: str = ""
    metadata: dict[str, str] = {}
    prompt_cache_key: str = ""
    safety_identifier: str = ""
    store: bool = False
    service_tier: str = ""


class _GenerateBody(_OpenAIBody, frozen=True, kw_only=True):
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    request_id: str = ""
    priority: int | None = None
    tenant: str | None = None
    session_id: str = ""
    return_token_ids: bool = False
    prompt_logprobs: int | None = None


class ChatBody(_GenerateBody, frozen=True, kw_only=True):
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


class CompletionBody(_GenerateBody, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False


class _EmbeddingBody(_OpenAIBody, frozen=True, kw_only=True):
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class _TokenizeBody(_Body, frozen=True, kw_only=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}


class _DetokenizeBody(_Body, frozen=True, kw_only=True):
    tokens: list[int]


_B = TypeVar("_B", bound=_Body)

# --- bytes to fields ---------------------------------------------------------------------------------------------


def parse(data: bytes) -> Fields:
    """Parse the fields that are not null. Raise `InvalidRequest`."""
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


def check_structure(data: bytes) -> None:
    """Raise `InvalidRequest` for JSON that takes long to parse; strings do not count."""
    if len(data) <= _SMALL or _fits(_pieces(data)) or _fits(_outside_strings(data)):
        return
    raise InvalidRequest(
        f"the body has more than {MAX_CONTAINERS} lists, objects and keys, or {MAX_ITEMS} values: send fewer"
    )


def _fits(pieces: Iterator[bytes]) -> bool:
    num_containers = num_items = 0
    for piece in pieces:
        num_containers += sum(map(piece.count, (b"[", b"{", b":")))
        num_items += piece.count(b",")
        if num_containers > MAX_CONTAINERS or num_items > MAX_ITEMS:
            return False
    return True


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yield pieces that cut no escape."""
    start = 0
    while start < len(data):
        match = _ESCAPE.match(data, min(start + _PIECE, len(data)))
        assert match is not None
        yield data[start : match.end()]
        start = match.end()


def _outside_strings(data: bytes) -> Iterator[bytes]:
    is_inside = 0
    for piece in _pieces(data):
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= (len(parts) - 1) & 1


def read_fields(fields: Fields, kind: type[_B]) -> tuple[_B, dict[str, object]]:
    """Return the body and the backend's parameters. Raise `InvalidRequest` or `Unsupported`."""
    for name, refused in _REFUSED.items():
        if name in fields and fields[name] not in refused.neutral:
            raise Unsupported(f"{name} is set: {refused.reason}")
    names = kind.__struct_fields__
    others = {key: value for key, value in fields.items() if key not in names and key not in _REFUSED}
    check_parameters(others)
    if flags := OUTPUT_FLAGS.keys() & others.keys():
        raise InvalidRequest(f"unknown parameter {min(flags)!r}: OpenAI's API has no output flags")
    try:
        return msgspec.convert({key: fields[key] for key in names if key in fields}, kind), others
    except msgspec.ValidationError as error:
        if missing := _MISSING.fullmatch(str(error)):
            raise FieldMissing(f"{missing[1]} is missing: it is required") from None
        what, _, place = str(error).partition(" - at `$.")  # "Expected `int` - at `$.n`" to "n: Expected `int`"
        raise InvalidRequest(f"{place.rstrip('`')}: {what}" if place else what) from None


def check_parameters(params: Fields) -> None:
    """Raise `InvalidRequest` beyond the backend's size limit."""
    if (size := len(msgspec.json.encode(params))) > MAX_PARAMETER_BYTES:
        raise InvalidRequest(f"the parameters have {size} bytes: at most {MAX_PARAMETER_BYTES} are allowed")


# --- fields to requests; raise `InvalidRequest` or `Unsupported` -------------------------------------------------


def read_chat(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, ChatBody)
    if body.echo:
        raise Unsupported("echo is set: a conversation is not returned; leave it out, or send false")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest(f"top_logprobs is {body.top_logprobs}, and logprobs is not true: set both, or none")
    params["max_tokens"] = _most_tokens(body)
    tools = body.tools if body.tool_choice != "none" else []
    names = frozenset(_function_name(tool) for tool in tools) if tools else None
    schema_name = ""
    if body.tool_choice not in ("auto", "none"):
        params["structured_outputs"], tools, names, schema_name = force_call(tools, body.tool_choice, params)
    if tools:
        params.setdefault("skip_special_tokens", False)  # a call's mark may be one
    prompt = _conversation(body.messages, tools, body.chat_template_kwargs)
    request = _generate_request(body, params, [prompt], (body.top_logprobs or 0) if body.logprobs else None)
    request.is_chat, request.tools, request.schema_name = True, names, schema_name
    request.has_one_call = not body.parallel_tool_calls
    return request


def read_completion(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, CompletionBody)
    request = _generate_request(body, params, _prompts("prompt", body.prompt, MAX_PROMPTS), body.logprobs)
    if body.echo:
        request.has_echo = request.params["echo"] = True
        if body.logprobs is not None:
            request.params["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return request


def read_embeddings(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, _EmbeddingBody)
    prompts = [prompt | {"task": "embed"} for prompt in _prompts("input", body.input, MAX_INPUTS)]
    in_base64 = body.encoding_format == "base64"
    return UpstreamRequest(
        model=body.model, prompts=prompts, params=params, dimensions=body.dimensions, in_base64=in_base64
    )


def read_tokenize(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, _TokenizeBody)
    if (body.prompt is None) is (body.messages is None):
        raise InvalidRequest("prompt or messages: send one of them")
    if body.messages is None and (body.tools or body.chat_template_kwargs):
        raise InvalidRequest("tools and chat_template_kwargs go with messages: leave them out")
    prompt: Prompt = {"text_input": body.prompt}
    if body.messages is not None:
        prompt = _conversation(body.messages, body.tools, body.chat_template_kwargs)
    return UpstreamRequest(model=body.model, prompts=[prompt | {"task": "tokenize"}], params=params)


def read_detokenize(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, _DetokenizeBody)
    prompts: list[Prompt] = [{"input_ids": body.tokens, "task": "detokenize"}] if body.tokens else []
    return UpstreamRequest(model=body.model, prompts=prompts, params=params)


def _generate_request(
    body: _GenerateBody, params: dict[str, object], prompts: list[Prompt], top_logprobs: int | None
) -> UpstreamRequest:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is set, and stream is not true: set both, or none")
    if len(body.request_id) > MAX_REQUEST_ID_CHARS or not body.request_id.isprintable():
        raise InvalidRequest(f"request_id must have at most {MAX_REQUEST_ID_CHARS} characters that can be printed")
    options = {"n": body.n, "logprobs": top_logprobs, "tenant": body.tenant, "priority": body.priority}
    options |= {"session_id": body.session_id or None, "prompt_logprobs": body.prompt_logprobs}
    params |= {name: value for name, value in options.items() if value is not None}
    flags = {"return_token_ids": body.return_token_ids, "return_logprobs": top_logprobs is not None}
    return UpstreamRequest(
        model=body.model,
        request_id=body.request_id,
        prompts=prompts,
        params=params | flags | {"return_perf_metrics": True},  # has the cached tokens
        n=body.n,
        session=body.session_id,
        stream=body.stream,
        stream_options=body.stream_options or StreamOptions(),
        top_logprobs=top_logprobs,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        follows_grammar=_follows_grammar(params),
    )


def _most_tokens(body: ChatBody) -> int:
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise InvalidRequest(f"max_tokens is {older}, and max_completion_tokens is {newer}: send one of them")
    return next((limit for limit in (older, newer) if limit is not None), MOST_TOKENS)


def _follows_grammar(params: dict[str, object]) -> bool:
    """Return whether a grammar covers the answer, which then has no reasoning."""
    answer_format = params.get("response_format")
    is_format = answer_format is not None and answer_format != {"type": "text"}
    return is_format or any(name == "structured_outputs" or name.startswith("guided_") for name in params)


def _conversation(messages: list[dict[str, Any]], tools: list[dict[str, Any]], template_kwargs: Fields) -> Prompt:
    messages = [_message(message) for message in messages]
    parts = {"tools": tools, "chat_template_kwargs": template_kwargs}
    # Messages last: routers hash the text, and a later turn begins with the former one.
    given = {name: part for name, part in parts.items() if part} | {"messages": messages}
    return {"messages": msgspec.json.encode(given if len(given) > 1 else messages).decode()}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Drop nulls, which clients send back, and rename OpenAI's developer role."""
    kept = {key: value for key, value in message.items() if value is not None}
    return kept | {"role": "system"} if kept.get("role") == "developer" else kept


def _function_name(tool: dict[str, Any]) -> str:
    function = tool.get("function")  # the backend checks it
    return str(function.get("name") if isinstance(function, dict) else None)


def _prompts(name: str, prompt: str | list[str | int | list[int]], limit: int) -> list[Prompt]:
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
