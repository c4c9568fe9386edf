"""Requests and answers of APIs whose answers are lists of thoughts, texts and calls of tools."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from tidewheel.gateway.answers import AnswerWriter, IndexedChunks, Json, Usage, as_typed_event, parser_of
from tidewheel.gateway.bodies import Body, ChatBody, Fields, RefusedFields, UpstreamRequest, read_fields
from tidewheel_client import Chunk
from tidewheel_client.errors import InvalidRequest

# Fields of chats that these APIs take too, and fields of chats alone.
_SHARED = frozenset({"priority", "tenant", "session_id", "request_id", "nvext"})
_OF_CHATS = frozenset({*ChatBody.__struct_fields__, "response_format"}) - _SHARED
_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")

_B = TypeVar("_B", bound=Body)


def read_own_fields(fields: Fields, kind: type[_B], refused: RefusedFields) -> tuple[_B, Fields]:
    """Return the checked body, and fields for `bodies.read_chat`. Raise `InvalidRequest` or `Unsupported`."""
    if foreign := sorted(_OF_CHATS.intersection(fields) - {*kind.__struct_fields__, *refused}):
        raise InvalidRequest(f"{foreign[0]} is a field of /v1/chat/completions: leave it out")
    return read_fields(fields, kind, refused)


def text_parts(name: str, content: object) -> list[Json]:
    """Return the content of a message, which is all text, as a chat has it. Raise `InvalidRequest`."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    texts = []
    for index, part in enumerate(content if isinstance(content, list) else [content]):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _TEXTS:
                texts.append({"type": "text", "text": text})
            case _:
                raise refused_part(f"{name}[{index}]", part, "text")
    return texts


def refused_part(name: str, part: object, known: str) -> InvalidRequest:
    kind = part.get("type") if isinstance(part, dict) else part
    return InvalidRequest(f"{name} is no part that is offered, or lacks a field ({str(kind)[:80]!r}): send {known}")


def function_call(call_id: str, name: str, arguments: object) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def response_format(given: Json | None) -> Json:
    """Return `response_format` of a chat for a format of these APIs, whose schema lies beside `type`; None: text."""
    given = given or {"type": "text"}
    parts = {key: part for key, part in given.items() if key != "type"}
    return {"type": given.get("type")} | ({"json_schema": {"name": "answer"} | parts} if parts else {})


@dataclass(slots=True)
class Block:
    kind: Literal["thoughts", "text", "call"]
    index: int  # in the answer
    text: str = ""  # of a call: the arguments
    name: str = ""  # of the called function
    call_id: str = ""


class BlockWriter(AnswerWriter):
    """Writer of one sequence as blocks. A subclass has an API's events, and its whole answer."""

    first_events: Callable[[], list[Json]]
    opened: Callable[[Block], list[Json]]
    extended: Callable[[Block, str], list[Json]]
    closed: Callable[[Block], list[Json]]
    last_events: Callable[[], list[Json]]
    answer: Callable[[], Json]

    def __init__(self, request: UpstreamRequest) -> None:
        super().__init__(request)
        self._parser = parser_of(request)
        self._has_begun = False
        self.usage = Usage()
        self.blocks: list[Block] = []
        self.is_cut = False

    def whole(self, chunks: IndexedChunks) -> bytes:
        for _, chunk in chunks:
            self.read(chunk)
        return msgspec.json.encode(self.answer())

    def events(self, _: int, response: Sequence[Chunk]) -> bytes:
        return self.encode([event for chunk in response for event in self.read(chunk)])

    def end(self) -> bytes:
        return self.encode(self.last_events())

    def encode(self, events: Sequence[Json]) -> bytes:
        return b"".join(map(as_typed_event, events))

    def read(self, chunk: Chunk) -> list[Json]:
        """Add a chunk to the blocks. Return its events."""
        self.usage.add(0, chunk)
        events = [] if self._has_begun else self.first_events()
        self._has_begun = True
        output = self._parser.push(chunk.text)
        if chunk.finish_reason is not None:
            output += self._parser.end()
            self.is_cut = chunk.finish_reason != "stop" or self._parser.was_cut
        calls = list(output.calls)
        if calls and not calls[0].id:
            events += self._add("call", calls.pop(0).arguments)
        events += self._add("thoughts", output.reasoning) + self._add("text", output.content)
        for call in calls:
            self.called.append(call.name)
            events += self._open(Block("call", len(self.blocks), name=call.name, call_id=call.id))
            events += self._add("call", call.arguments)
        if self.is_cut:
            self.called.clear()
        if chunk.finish_reason is not None and self.blocks:
            events += self.closed(self.blocks[-1])
        return events

    def _add(self, kind: Literal["thoughts", "text", "call"], text: str) -> list[Json]:
        if not text:
            return []
        is_open = bool(self.blocks) and self.blocks[-1].kind == kind
        opened = [] if is_open else self._open(Block(kind, len(self.blocks)))
        self.blocks[-1].text += text
        return opened + self.extended(self.blocks[-1], text)

    def _open(self, block: Block) -> list[Json]:
        self.blocks.append(block)
        return (self.closed(self.blocks[-2]) if block.index else []) + self.opened(block)
