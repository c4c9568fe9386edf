"""OpenAI's `/v1/responses`, as chats."""

import itertools
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec

from tidewheel.gateway import blocks
from tidewheel.gateway.answers import Json
from tidewheel.gateway.bodies import Effort, Fields, OpenAIBody, RefusedFields, UpstreamRequest, read_chat
from tidewheel.gateway.errors import FieldMissing, PreviousResponseMissing
from tidewheel_client.errors import PromptTooLarge, Unsupported

MAX_STORED_BYTES = 64 << 20  # of all owners
MAX_CONVERSATION_BYTES = 1 << 22  # that is continued
STORED_S = 3600.0
MISSING = "is not stored for this key: store was false, it was deleted or dropped, or the gateway has several workers"
_ENTRY_BYTES = 1024  # beside the texts
_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder()
_REFUSED: RefusedFields = {
    "background": ("a client waits for each answer: send false", (False,)),
    "conversation": ("conversations are not stored: send previous_response_id", ()),
    "prompt": ("there are no stored prompts: send input", ()),
    "truncation": ("nothing is cut from an input: send disabled", ("disabled",)),
    "include": ("answers have nothing more: leave it out", ([], ["reasoning.encrypted_content"])),
    "stream_options": ("events are not padded: leave it out", ({}, {"include_obfuscation": False})),
    "top_logprobs": ("send a chat with logprobs", (0,)),
    "max_tool_calls": ("the client alone calls tools: leave it out", ()),
    "max_tokens": ("send max_output_tokens", ()),
    "service_tier": ("there are no tiers: send priority, 1 to 4", ("auto", "default", "flex")),
}
_NAMES = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning", "temperature", "text")
# Fields of a request that its response repeats, with what stands for those that were left out.
_ECHOED = dict.fromkeys((*_NAMES, "top_p", "user")) | {
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
_FORMS = {  # prefix of the item's id, name of its events, and of its text
    "thoughts": ("rs", "response.reasoning_text", "text"),
    "text": ("msg", "response.output_text", "text"),
    "call": ("fc", "response.function_call_arguments", "arguments"),
}


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # thoughts come in full


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(OpenAIBody, frozen=True, kw_only=True):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # type: ignore[assignment]
    stream: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    client_metadata: dict[str, Any] | None = None  # without effect
    chat_template_kwargs: dict[str, Any] | None = None


class StoredResponse(NamedTuple):
    messages: bytes  # of the conversation, one JSON a line
    answer: bytes
    session_id: str  # of the conversation's KV blocks
    expires_at: float  # monotonic seconds


class ResponseStore:
    """Responses by owner and id, in memory. Beyond `max_bytes`, the owner with most bytes loses its oldest."""

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self.max_bytes = max_bytes  # 0: none is stored
        self._responses = defaultdict[str, dict[str, StoredResponse]](dict)  # by owner and id, the oldest first
        self._num_bytes = Counter[str]()  # by owner

    def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        self._responses[owner][response_id] = response
        self._num_bytes[owner] += _size(response)
        while self._num_bytes.total() > self.max_bytes:
            ((largest, _),) = self._num_bytes.most_common(1)
            self.remove(largest, next(iter(self._responses[largest])))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return self._responses.get(owner, {}).get(response_id)

    def remove(self, owner: str, response_id: str) -> StoredResponse | None:
        response = self._responses.get(owner, {}).pop(response_id, None)
        self._num_bytes -= Counter({owner: _size(response)} if response else {})  # drops zeros
        if owner not in self._num_bytes:
            self._responses.pop(owner, None)
        return response

    def expire(self, now: float) -> None:
        for owner, of_owner in list(self._responses.items()):
            for key, _ in list(itertools.takewhile(lambda item: item[1].expires_at <= now, of_owner.items())):
                self.remove(owner, key)


def _size(response: StoredResponse) -> int:
    return len(response.messages) + len(response.answer) + _ENTRY_BYTES


class ResponseTurn:
    """One request of an owner, and its response."""

    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self.id = f"resp_{secrets.token_hex(24)}"
        self.fields: Fields = {}
        self.is_stored = store.max_bytes > 0
        self._messages: list[Json] = []  # of the conversation, without instructions; later of the answer
        self._asked = b""  # messages of the request, one a line, if the response is to be stored
        self._session_id = ""

    def read(self, fields: Fields) -> UpstreamRequest:
        body, params = blocks.read_own_fields(fields, ResponsesBody, _REFUSED)
        self.fields, effort = fields, body.reasoning.effort
        if body.store and not self.is_stored:
            raise Unsupported("store is true: workers of a gateway share no answers; send false, and the whole input")
        if body.previous_response_id is not None:
            self._continue(body.previous_response_id, params)
        elif body.input is None:
            raise FieldMissing("input is missing: it is required")
        items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input or []
        for index, item in enumerate(items):
            self._add(f"input[{index}]", item)
        instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
        params |= {"model": body.model, "messages": [*instructions, *self._messages], "stream": body.stream}
        params["tools"] = [_tool(tool) for tool in body.tools]
        params |= {"tool_choice": _tool_choice(body.tool_choice), "parallel_tool_calls": body.parallel_tool_calls}
        if body.max_output_tokens is not None:
            params["max_tokens"] = body.max_output_tokens
        params |= {"reasoning_effort": effort, "chat_template_kwargs": body.chat_template_kwargs or {}}
        params["response_format"] = blocks.response_format(body.text.format)
        self.is_stored &= body.store is not False
        request = read_chat(params)
        self._session_id = request.params.get("session_id", self.id)
        if self.is_stored:
            self._asked = _encoder.encode_lines(self._messages)
        self._messages = []
        return request

    def num_previous_bytes(self, fields: Fields) -> int:
        """Return the size of the conversation that a request goes on with; its own body is small."""
        response_id = fields.get("previous_response_id")
        previous = self._store.get(self._owner, response_id) if isinstance(response_id, str) else None
        return 0 if previous is None else min(len(previous.messages), MAX_CONVERSATION_BYTES)

    def _continue(self, response_id: str, params: Fields) -> None:
        """Begin with the messages of a response, in its session. Raise `RequestError`."""
        previous = self._store.get(self._owner, response_id)
        if previous is None:
            raise PreviousResponseMissing(f"previous_response_id {response_id[:80]!r} {MISSING}")
        if (size := len(previous.messages)) > MAX_CONVERSATION_BYTES:
            most = MAX_CONVERSATION_BYTES
            raise PromptTooLarge(f"previous_response_id names {size} bytes of messages: at most {most} are allowed")
        params.setdefault("session_id", previous.session_id)
        self._messages = _decoder.decode_lines(previous.messages)

    def _add(self, name: str, item: Json) -> None:
        match {"type": "message", **item}:
            case {"type": "message", "role": "assistant", "content": content}:
                self._say("content", blocks.text_parts(f"{name}.content", content))
            case {"type": "message", "role": str(role), "content": content}:
                self._messages.append({"role": role, "content": blocks.text_parts(f"{name}.content", content)})
            case {"type": "reasoning"}:
                thoughts = blocks.text_parts(f"{name}.content", item.get("content") or item.get("summary") or [])
                self._say("reasoning_content", "\n".join(part["text"] for part in thoughts))
            case {"type": "function_call", "call_id": str(call), "name": str(function), "arguments": str(arguments)}:
                self._say("tool_calls", [blocks.function_call(call, function, arguments)])
            case {"type": "function_call_output", "call_id": str(call), "output": output}:
                content = blocks.text_parts(f"{name}.output", output)
                self._messages.append({"role": "tool", "tool_call_id": call, "content": content})
            case _:
                raise blocks.refused_part(name, item, "message, reasoning, function_call or function_call_output")

    def _say(self, key: str, part: Any) -> None:
        """Add thoughts, text or calls. In this order, they make up one message of the assistant."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant" or key == "reasoning_content" or (key == "content" and last.get(key)):
            self._messages.append(last := {"role": "assistant", "content": ""})
        if key == "tool_calls":
            last.setdefault(key, []).extend(part)
        else:
            last[key] = part

    def keep(self, answer: Json) -> None:
        """Store the response, unless the request forbids that."""
        if not self.is_stored:
            return
        for index, item in enumerate(answer["output"]):
            self._add(f"output[{index}]", item)
        messages, expires_at = self._asked + _encoder.encode_lines(self._messages), time.monotonic() + STORED_S
        stored = StoredResponse(messages, msgspec.json.encode(answer), self._session_id, expires_at)
        self._store.put(self._owner, self.id, stored)


def _tool_choice(choice: str | Json) -> str | Json:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": list(tools), **others}:
            return {"type": "allowed_tools", "allowed_tools": others | {"tools": list(map(_tool_choice, tools))}}
    return choice


def _tool(tool: Json) -> Json:
    """Return a chat's tool. The backend refuses other kinds than functions."""
    return {"type": tool.get("type"), "function": {key: part for key, part in tool.items() if key != "type"}}


class ResponseWriter(blocks.BlockWriter):
    def __init__(self, request: UpstreamRequest, turn: ResponseTurn) -> None:
        super().__init__(request)
        self._turn = turn
        self._numbers = itertools.count()
        self._created = int(time.time())

    def encode(self, events: Sequence[Json]) -> bytes:
        return super().encode([{**event, "sequence_number": next(self._numbers)} for event in events])

    def failed(self, error: bytes) -> bytes:
        reason = msgspec.json.decode(error)["error"]
        reason["code"] = "rate_limit_exceeded" if reason["code"] == "rate_limit_exceeded" else "server_error"
        return self.encode([{"type": "response.failed", "response": self._response("failed", error=reason)}])

    def first_events(self) -> list[Json]:
        response = self._response("in_progress")
        return [{"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress")]

    def opened(self, block: blocks.Block) -> list[Json]:
        item = self._item(replace(block, text=""), "in_progress")
        parts = item.pop("content", [])
        added = [{"type": "response.output_item.added", "output_index": block.index, "item": item}]
        if parts:
            item["content"] = []
        return added + [self._event(block, "response.content_part.added", part=part) for part in parts]

    def extended(self, block: blocks.Block, text: str) -> list[Json]:
        _, event, _ = _FORMS[block.kind]
        return [self._event(block, f"{event}.delta", delta=text)]

    def closed(self, block: blocks.Block) -> list[Json]:
        is_cut = block is self.blocks[-1] and self.is_cut
        item, (_, event, key) = self._item(block, "incomplete" if is_cut else "completed"), _FORMS[block.kind]
        ended = [self._event(block, f"{event}.done", **{key: block.text})]
        ended += [self._event(block, "response.content_part.done", part=part) for part in item.get("content", [])]
        return [*ended, {"type": "response.output_item.done", "output_index": block.index, "item": item}]

    def last_events(self) -> list[Json]:
        answer = self.answer()
        return [{"type": f"response.{answer['status']}", "response": answer}]

    def answer(self) -> Json:
        answer = self._response("incomplete" if self.is_cut else "completed")
        self._turn.keep(answer)
        return answer

    def _event(self, block: blocks.Block, kind: str, **fields: Any) -> Json:
        if block.kind != "call":
            fields |= {"content_index": 0}
        if kind.startswith("response.output_text"):
            fields |= {"logprobs": []}
        return {"type": kind, "item_id": self._item_id(block), "output_index": block.index, **fields}

    def _item_id(self, block: blocks.Block) -> str:
        return f"{_FORMS[block.kind][0]}_{self._turn.id.removeprefix('resp_')}{block.index:04x}"

    def _item(self, block: blocks.Block, status: str) -> Json:
        head: Json = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            named = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**head, "type": "function_call", **named}
        if block.kind == "thoughts":
            content: Json = {"type": "reasoning_text", "text": block.text}
            return {**head, "type": "reasoning", "summary": [], "content": [content]}
        content = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
        return {**head, "type": "message", "role": "assistant", "content": [content]}

    def _response(self, status: str, error: Json | None = None) -> Json:
        usage, is_over = self.usage, status != "in_progress"
        output = [self._item(block, "completed") for block in self.blocks if is_over]
        if output and status != "completed":
            output[-1]["status"] = "incomplete"
        counts = {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
            "output_tokens": usage.num_output,
            "output_tokens_details": {"reasoning_tokens": 0},  # thoughts are not counted apart
            "total_tokens": usage.num_prompt + usage.num_output,
        }
        return {
            "id": self._turn.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.request.model_id,
            "output": output,
            "usage": counts if is_over else None,
            "store": self._turn.is_stored,
            **{name: self._turn.fields.get(name, default) for name, default in _ECHOED.items()},
        }
