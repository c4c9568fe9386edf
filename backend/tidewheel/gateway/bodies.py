"""Bodies of HTTP requests. Fields that are not listed here are left to the backend."""

import itertools
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from tidewheel.gateway.errors import FieldMissing
from tidewheel.gateway.output_parser import ExpectedCalls, Reasoning, allowed_tools, forced_functions, functions_of
from tidewheel.request import Priority
from tidewheel.request_options import to_priority
from tidewheel_client.codec import OUTPUT_FLAGS
from tidewheel_client.errors import DeadlineExceeded, InvalidRequest, Unsupported

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
MAX_DEPTH = 512  # far below the depth at which Python refuses to read or write JSON
_PIECE = 1 << 18  # bytes; other threads run between pieces
_ESCAPE = re.compile(rb"\\*[^\\]?")
_THINKING = ("enable_thinking", "thinking")  # switches of chat templates: Qwen 3 and GLM; DeepSeek 3.1 and Granite
_CONTAINERS = (dict, list)
_ORDER = "lora_order"  # parameter for Triton's ports; the gateway's own paths check the key first
_UNICODE = re.compile(r"\\+u([0-9a-fA-F]{4})")
_OBJECTIVES = ("ttft_ms", "tpot_ms", "objective_action")
# Of llm-d and of the Gateway API's inference extension: newer name, older name.
_OBJECTIVE_HEADERS = {
    "ttft_ms": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"), "tpot_ms": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
}  # fmt: skip
_PROMPTS = ("text_input", "input_ids", "messages")  # of Triton's calls; a router reads them
_TOO_DEEP = "the body is nested too deep"
_MISSING = re.compile("Object missing required field `(.*)`")  # by msgspec

Prompt = dict[str, object]  # tensors by name
Fields = dict[str, Any]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Refused fields: the reason, and values that request nothing, beside null.
RefusedFields = Mapping[str, tuple[str, tuple[object, ...]]]
_REFUSED: RefusedFields = {
    "num_return_sequences": ("set n", (False,)),
    "close_session": ("a session ends by its time (session_ttl_s), or over gRPC", (False,)),
    "pause_session": ("the gateway sees which tools an answer calls: leave it out", ([],)),
    "functions": ("send tools", ([],)),
    "function_call": ("send tools and tool_choice", ("none", "auto")),
    "store": ("answers are not stored: send false, or leave it out", (False,)),
    "service_tier": ("there are no tiers: send priority, 1 to 4", ("auto", "default", "flex")),
}


class Body(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""  # empty: the only one


class OpenAIBody(Body, frozen=True, kw_only=True):
    user: str = ""
    metadata: dict[str, str] = {}
    prompt_cache_key: str = ""
    safety_identifier: str = ""
    store: bool = False
    service_tier: str = ""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # in every chunk, as in vLLM


class AgentHints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hints of NVIDIA Dynamo. `osl` has no effect: lengths are predicted from earlier answers."""

    priority: int = 0  # higher ones are more urgent
    osl: int | None = None
    speculative_prefill: bool = False


class DynamoExtensions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    agent_hints: AgentHints = AgentHints()

    @property
    def priority(self) -> int | None:
        """Return the class that is asked for; None for the default. Raise `Unsupported`."""
        if self.agent_hints.speculative_prefill:
            raise Unsupported("speculative_prefill is set: a turn is computed when it arrives; send false")
        hint = self.agent_hints.priority
        return Priority.HIGH.value if hint > 0 else Priority.LOW.value if hint < 0 else None


class GenerateBody(OpenAIBody, frozen=True, kw_only=True):
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    request_id: str = ""
    priority: int | str | None = None
    tenant: str | None = None
    session_id: str = ""
    return_token_ids: bool = False
    prompt_logprobs: int | None = None
    echo: bool = False
    nvext: DynamoExtensions = DynamoExtensions()


class ChatBody(GenerateBody, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Effort | None = None


class CompletionBody(GenerateBody, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class _TokenizeBody(Body, frozen=True, kw_only=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}


class _DetokenizeBody(Body, frozen=True, kw_only=True):
    tokens: list[int]


_B = TypeVar("_B", bound=Body)


@dataclass(slots=True, kw_only=True)
class UpstreamRequest:
    """Client's request to a server; each of its prompts is sent separately."""

    prompts: list[Prompt]
    params: Fields
    body: Body = field(default_factory=Body)
    model: str = ""
    model_id: str = ""  # model or adapter as the client named it; answers repeat it
    request_id: str = ""
    traceparent: str = ""
    stream: bool = False
    calls: ExpectedCalls = field(default_factory=ExpectedCalls)
    reasoning: Reasoning = "tagged"  # how the model marks its thoughts
    begun: float = field(default_factory=time.monotonic)  # start of `deadline_ms` and `ttft_ms`

    @property
    def lora(self) -> str:
        """Name of the adapter; empty for the model alone."""
        name = self.params.get("lora_name")
        return name if isinstance(name, str) else ""  # the server refuses others

    def due(self, limit: str = "deadline_ms") -> float:
        """Return the end of a limit in milliseconds by `time.monotonic`; infinite without a valid one."""
        value = self.params.get(limit, math.nan)
        try:
            limit_ms = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):  # the server refuses it
            return math.inf
        return self.begun + limit_ms / 1000 if limit_ms > 0 else math.inf

    def params_left(self, round_trip_s: float = 0.0) -> Mapping[str, object]:
        """Parameters with the deadline that remains for a server so far away. Raise `DeadlineExceeded`."""
        if (due := self.due()) == math.inf:
            return self.params
        if (left_ms := 1000 * (due - time.monotonic())) < 1:
            raise DeadlineExceeded(f"deadline_ms is {self.params['deadline_ms']}: it passed as a server was lost")
        return self.params | {"deadline_ms": max(int(left_ms - 1000 * round_trip_s), 1)}


def add_objectives(params: Fields, fields: Fields, headers: Mapping[str, str]) -> None:
    """Add to the parameters the objectives that they lack: those of the body's `metadata`, then those of headers."""
    metadata = fields.get("metadata")
    given = metadata if isinstance(metadata, dict) else {}
    for name in _OBJECTIVES:
        values = (given.get(name), *map(headers.get, _OBJECTIVE_HEADERS.get(name, ())))
        if (value := next((one for one in values if one is not None), None)) is not None:
            params.setdefault(name, value)


def parse(data: bytes) -> Fields:
    """Return a JSON body's fields that are not null. Raise `InvalidRequest`."""
    check_structure(data)
    try:
        fields = msgspec.json.decode(data)
    except RecursionError:
        raise InvalidRequest(_TOO_DEEP) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_too_deep(fields):
        raise InvalidRequest(_TOO_DEEP)
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    if len(fields) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(fields)} fields: at most {MAX_FIELDS} are allowed")
    if (longest := max(map(len, fields), default=0)) > MAX_NAME_CHARS:
        raise InvalidRequest(f"a field's name has {longest} characters: at most {MAX_NAME_CHARS} are allowed")
    return {key: value for key, value in fields.items() if value is not None}


def _is_too_deep(fields: Fields) -> bool:
    """Return whether more than `MAX_DEPTH` lists and objects lie in one another."""
    layer: list[Any] = [fields]
    for _ in range(MAX_DEPTH):
        values = itertools.chain.from_iterable(one.values() if isinstance(one, dict) else one for one in layer)
        layer = [value for value in values if isinstance(value, _CONTAINERS)]
        if not layer:
            return False
    return True


def check_structure(data: bytes) -> None:
    """Raise `InvalidRequest` for JSON with too many values. Brackets and commas inside strings do not count."""
    start = num_containers = num_items = is_inside = 0
    is_large = sum(map(data.count, (b"[", b"{", b":"))) > MAX_CONTAINERS or data.count(b",") > MAX_ITEMS
    while is_large and start < len(data):
        match = _ESCAPE.match(data, min(start + _PIECE, len(data)))
        assert match is not None
        piece, start = data[start : match.end()], match.end()
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_inside::2])
        is_inside ^= (len(parts) - 1) & 1
        num_containers += sum(map(outside.count, (b"[", b"{", b":")))
        num_items += outside.count(b",")
        if num_containers > MAX_CONTAINERS or num_items > MAX_ITEMS:
            raise InvalidRequest(
                f"the body has more than {MAX_CONTAINERS} lists, objects and keys, or {MAX_ITEMS} values: send fewer"
            )


def read_fields(
    fields: Fields, kind: type[_B], refused: RefusedFields = _REFUSED, *, strict: bool = True
) -> tuple[_B, Fields]:
    """Return the checked body, and the parameters for the backend. Raise `InvalidRequest` or `Unsupported`.

    Without `strict`, texts stand for other values.
    """
    for name, (reason, neutral) in refused.items():
        if name in fields and fields[name] not in neutral:
            raise Unsupported(f"{name} is set: {reason}")
    names = kind.__struct_fields__
    others = {key: value for key, value in fields.items() if key not in names and key not in refused}
    check_parameters(others)
    if flags := OUTPUT_FLAGS.keys() & others.keys():
        raise InvalidRequest(f"unknown parameter {min(flags)!r}: OpenAI's API has no output flags")
    try:
        return msgspec.convert({key: fields[key] for key in names if key in fields}, kind, strict=strict), others
    except msgspec.ValidationError as error:
        if missing := _MISSING.fullmatch(str(error)):
            raise FieldMissing(f"{missing[1]} is missing: it is required") from None
        what, _, place = str(error).partition(" - at `$.")  # "Expected `int` - at `$.n`" to "n: Expected `int`"
        raise InvalidRequest(f"{place.rstrip('`')}: {what}" if place else what) from None


def check_parameters(params: Fields) -> None:
    """Raise `InvalidRequest` if the parameters exceed the backend's size limit, `Unsupported` for `lora_order`."""
    nested = _UNICODE.sub(lambda match: chr(int(match[1], 16)), str(params.get("sampling_parameters", "")))  # JSON
    if _ORDER in nested or any(name.startswith(_ORDER) for name in params):  # Triton ends names at a NUL
        raise Unsupported(f"{_ORDER} is set: POST /v1/load_lora_adapter or /v1/unload_lora_adapter")
    if (size := len(msgspec.json.encode(params))) > MAX_PARAMETER_BYTES:
        raise InvalidRequest(f"the parameters have {size} bytes: at most {MAX_PARAMETER_BYTES} are allowed")


def read_chat(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, ChatBody)
    if body.echo:
        raise Unsupported("echo is set: a conversation is not returned; leave it out, or send false")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest(f"top_logprobs is {body.top_logprobs}, and logprobs is not true: set both, or none")
    params["max_tokens"] = _most_tokens(body)
    allowed, choice = allowed_tools(body.tools, body.tool_choice)
    # Where a grammar allows some of the tools, the prompt has all, and its beginning stays cached.
    tools = [] if choice == "none" else allowed if choice == "auto" else body.tools
    functions, must_call, rules = functions_of(allowed), choice not in ("auto", "none"), Fields()
    if must_call:
        functions = forced_functions(functions, choice, params)
        rules = {"tool_choice": list(functions)}
    if tools and (not body.parallel_tool_calls or isinstance(choice, dict)):
        rules["parallel_tool_calls"] = False
    if tools:
        params.setdefault("skip_special_tokens", False)  # a call's mark may be one
    thinks = None if body.reasoning_effort is None else body.reasoning_effort != "none"
    variables = template_variables(body.chat_template_kwargs, thinks, body.reasoning_effort)
    prompt = _conversation(body.messages, tools, variables, rules)
    request = _generate_request(body, params, [prompt], (body.top_logprobs or 0) if body.logprobs else None)
    is_strict = not must_call and any(function.get("strict") for function in functions.values())
    request.calls = ExpectedCalls(functions if tools else None, must_call, is_strict, body.parallel_tool_calls)
    return request


def read_completion(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, CompletionBody)
    request = _generate_request(body, params, prompts_of("prompt", body.prompt, MAX_PROMPTS), body.logprobs)
    if body.echo:
        request.params["echo"] = True
        if body.logprobs is not None:
            request.params["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return request


def read_tokenize(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, _TokenizeBody)
    if (body.prompt is None) is (body.messages is None):
        raise InvalidRequest("prompt or messages: send one of them")
    if body.messages is None and (body.tools or body.chat_template_kwargs):
        raise InvalidRequest("tools and chat_template_kwargs go with messages: leave them out")
    prompt: Prompt = {"text_input": body.prompt}
    if body.messages is not None:
        prompt = _conversation(body.messages, body.tools, body.chat_template_kwargs, {})
    return UpstreamRequest(body=body, prompts=[prompt | {"task": "tokenize"}], params=params)


def read_detokenize(fields: Fields) -> UpstreamRequest:
    body, params = read_fields(fields, _DetokenizeBody)
    prompts: list[Prompt] = [{"input_ids": body.tokens, "task": "detokenize"}] if body.tokens else []
    return UpstreamRequest(body=body, prompts=prompts, params=params)


def _generate_request(
    body: GenerateBody, params: Fields, prompts: list[Prompt], logprobs: int | None
) -> UpstreamRequest:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is set, and stream is not true: set both, or none")
    if len(body.request_id) > MAX_REQUEST_ID_CHARS or not body.request_id.isprintable():
        raise InvalidRequest(f"request_id must have at most {MAX_REQUEST_ID_CHARS} characters that can be printed")
    hinted = body.nvext.priority
    priority = hinted if body.priority is None else to_priority("priority", body.priority).value
    options = {"n": body.n, "logprobs": logprobs, "tenant": body.tenant, "priority": priority}
    options |= {"session_id": body.session_id or None, "prompt_logprobs": body.prompt_logprobs}
    params |= {name: value for name, value in options.items() if value is not None}
    params |= {"return_token_ids": body.return_token_ids, "return_logprobs": logprobs is not None}
    params["return_perf_metrics"] = True  # has the cached tokens
    return UpstreamRequest(body=body, request_id=body.request_id, prompts=prompts, params=params, stream=body.stream)


def _most_tokens(body: ChatBody) -> int:
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        raise InvalidRequest(f"max_tokens is {older}, and max_completion_tokens is {newer}: send one of them")
    return next((limit for limit in (older, newer) if limit is not None), MOST_TOKENS)


def template_variables(given: Fields, thinks: bool | None, effort: str | None) -> Fields:
    """Return `chat_template_kwargs`; those given win over what follows from the other fields."""
    is_open = thinks is not None and given.keys().isdisjoint(_THINKING)
    switches = dict.fromkeys(_THINKING, thinks) if is_open else {}
    return switches | ({} if effort is None else {"reasoning_effort": effort}) | given


def _conversation(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], template_kwargs: Fields, rules: Fields
) -> Prompt:
    messages = [_message(message) for message in messages]
    parts = {"tools": tools, "chat_template_kwargs": template_kwargs}
    # Messages last: routers hash the text, and a later turn begins with the former one.
    given = {name: part for name, part in parts.items() if part} | rules | {"messages": messages}
    return {"messages": msgspec.json.encode(given if len(given) > 1 else messages).decode()}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None}
    return kept | {"role": "system"} if kept.get("role") == "developer" else kept


def prompts_of(name: str, prompt: str | list[str | int | list[int]], limit: int) -> list[Prompt]:
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


def read_triton(fields: Fields, *, stream: bool = False) -> UpstreamRequest:
    """Return the request of Triton's HTTP call `generate` or `generate_stream`. Raise `InvalidRequest`.

    `parameters` move to the top level for API keys to check.
    """
    nested = fields.pop("parameters", {})
    if not isinstance(nested, dict):
        raise InvalidRequest("parameters must be an object of parameters")
    if twice := sorted(nested.keys() & fields.keys()):
        raise InvalidRequest(f"{twice[0]} stands in parameters and beside it: give it once")
    params = fields | nested
    prompt = {name: params.pop(name) for name in _PROMPTS if name in params}
    check_parameters(params)
    return UpstreamRequest(prompts=[prompt], params=params, stream=stream)
