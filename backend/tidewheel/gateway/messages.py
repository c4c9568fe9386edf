"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, as chats."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from tidewheel.gateway import blocks, bodies
from tidewheel.gateway.answers import AnswerWriter, IndexedChunks, Json
from tidewheel.gateway.bodies import Body, Fields, RefusedFields, UpstreamRequest, read_chat, read_tokenize
from tidewheel_client import Chunk
from tidewheel_client.errors import InvalidRequest

SIGNATURE = "unsigned"  # of thoughts: clients send back only those with one
_KEEPS_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}
_REFUSED: RefusedFields = {
    "service_tier": ("there are no tiers: send priority, 1 to 4", ("auto", "standard_only")),
    "context_management": ("no context is edited: leave it out", ({"edits": []}, {"edits": [_KEEPS_THOUGHTS]})),
    "stop": ("send stop_sequences", ()),
    "include_stop_str_in_output": ("stop_sequence has the text", (False,)),
}
_KEYS_BESIDE_FUNCTION = ("type", "input_schema", "cache_control", "eager_input_streaming")
_DELTAS = {"thoughts": "thinking", "text": "text", "call": "input_json"}


class InputMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None  # max_tokens alone is the limit
    display: Literal["summarized"] | None = None  # in full


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountBody(Body, frozen=True, kw_only=True):
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] = ""
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice("auto")
    thinking: Thinking | None = None  # None: as the chat template has it
    output_config: OutputConfig = OutputConfig()
    cache_control: dict[str, Any] | None = None  # prefixes are cached anyway
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountBody, frozen=True, kw_only=True):
    max_tokens: int
    stream: bool = False
    stop_sequences: tuple[str, ...] = ()
    metadata: dict[str, str | None] | None = None  # without effect


def read_messages(fields: Fields) -> UpstreamRequest:
    body, params = blocks.read_own_fields(fields, MessagesBody, _REFUSED)
    if body.messages and body.messages[-1].role == "assistant":
        raise InvalidRequest("messages end with an assistant's: a begun answer is not continued; end with a user's")
    params |= _conversation(body)
    params |= {"max_tokens": body.max_tokens, "stream": body.stream, "tool_choice": _tool_choice(body.tool_choice)}
    params["response_format"] = blocks.response_format(body.output_config.format)
    params["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.stop_sequences:
        params["stop"] = body.stop_sequences
        # To see which one ended the answer. With tools, an end token would come too.
        params["include_stop_str_in_output"] = not body.tools
    return read_chat(params)


def read_count(fields: Fields) -> UpstreamRequest:
    body, params = blocks.read_own_fields(fields, CountBody, _REFUSED)
    return read_tokenize(params | _conversation(body))


def _conversation(body: CountBody) -> Fields:
    system = blocks.text_parts("system", body.system) if body.system else []
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(body.messages):
        messages += _messages(f"messages[{index}].content", message)
    tools = [_tool(tool) for tool in body.tools]
    thinks = None if body.thinking is None else body.thinking.type != "disabled"
    variables = bodies.template_variables(body.chat_template_kwargs or {}, thinks, body.output_config.effort)
    return {"model": body.model, "messages": messages, "tools": tools, "chat_template_kwargs": variables}


def _messages(name: str, message: InputMessage) -> Iterator[Json]:
    """Yield the messages of a chat that stand for one of Anthropic's: there, each result of a tool is its own."""
    texts: list[Json] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    content = blocks.text_parts(name, message.content) if isinstance(message.content, str) else message.content
    for index, block in enumerate(content):
        match block:
            case {"type": "text", "text": str(text)}:
                texts += blocks.text_parts(name, text)
            case {"type": "thinking", "thinking": str(thinking)}:
                thoughts.append(thinking)
            case {"type": "tool_use", "id": str(call_id), "name": str(function), "input": dict(arguments)}:
                calls.append(blocks.function_call(call_id, function, arguments))
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                if texts:
                    yield {"role": message.role, "content": texts}
                failed = blocks.text_parts(name, "Error:") if block.get("is_error") else []
                result = failed + blocks.text_parts(f"{name}[{index}].content", block.get("content", ""))
                texts = []
                yield {"role": "tool", "tool_call_id": call_id, "content": result}
            case _:
                raise blocks.refused_part(f"{name}[{index}]", block, "text, thinking, tool_use or tool_result")
    parts = {"reasoning_content": "\n".join(thoughts), "tool_calls": calls}
    if texts or thoughts or calls or not content:
        yield {"role": message.role, "content": texts} | {key: part for key, part in parts.items() if part}


def _tool(tool: Json) -> Json:
    function = {key: part for key, part in tool.items() if key not in _KEYS_BESIDE_FUNCTION}
    kind = "function" if tool.get("type", "custom") == "custom" else tool["type"]  # others are refused by the backend
    return {"type": kind, "function": function | {"parameters": tool.get("input_schema")}}


def _tool_choice(choice: ToolChoice) -> str | Json:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


class CountWriter(AnswerWriter):
    def whole(self, chunks: IndexedChunks) -> bytes:
        found = msgspec.json.decode("".join(chunk.text for _, chunk in chunks))
        return msgspec.json.encode({"input_tokens": found["count"]})


class MessageWriter(blocks.BlockWriter):
    def __init__(self, request: UpstreamRequest) -> None:
        super().__init__(request)
        self._stops: Sequence[str] = request.params.get("stop", ())
        self._found: str | None = None  # stop sequence

    def failed(self, error: bytes) -> bytes:
        return b"event: error\n" + super().failed(error)

    def read(self, chunk: Chunk) -> list[Json]:
        if chunk.finish_reason == "stop":
            self._found = max(filter(chunk.text.endswith, self._stops), key=len, default=None)
            chunk = replace(chunk, text=chunk.text.removesuffix(self._found or ""))
        return super().read(chunk)

    def first_events(self) -> list[Json]:
        return [{"type": "message_start", "message": self._message([], None)}, {"type": "ping"}]

    def opened(self, block: blocks.Block) -> list[Json]:
        empty = _content(replace(block, text=""))
        return [{"type": "content_block_start", "index": block.index, "content_block": empty}]

    def extended(self, block: blocks.Block, text: str) -> list[Json]:
        kind = _DELTAS[block.kind]
        delta = {"type": f"{kind}_delta", "partial_json" if block.kind == "call" else kind: text}
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}]

    def closed(self, block: blocks.Block) -> list[Json]:
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        signed: Json = {"type": "content_block_delta", "index": block.index, "delta": signature}
        stop = {"type": "content_block_stop", "index": block.index}
        return [signed, stop] if block.kind == "thoughts" else [stop]

    def last_events(self) -> list[Json]:
        end = self._message([], self._reason())
        delta = {key: end[key] for key in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": end["usage"]}, {"type": "message_stop"}]

    def answer(self) -> Json:
        return self._message([_content(block) for block in self.blocks], self._reason())

    def _reason(self) -> str:
        if self._found:
            return "stop_sequence"
        return "max_tokens" if self.is_cut else "tool_use" if self.called else "end_turn"

    def _message(self, content: list[Json], stop_reason: str | None) -> Json:
        num_cached = self.usage.num_cached
        return {
            "id": f"msg_{self.request.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.request.model_id,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._found,
            "usage": {
                "input_tokens": self.usage.num_prompt - num_cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": num_cached,
                "output_tokens": self.usage.num_output,
            },
        }


def _content(block: blocks.Block) -> Json:
    if block.kind == "thoughts":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE if block.text else ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    try:
        arguments = msgspec.json.decode(block.text, type=dict[str, Any])
    except msgspec.DecodeError:  # not begun, or cut
        arguments = {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
