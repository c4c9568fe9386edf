"""Answers in OpenAI's format, whole or as server-sent events, and answers to vLLM's tokenizer calls."""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidewheel.gateway.bodies import ChatBody, GenerateBody, StreamOptions, UpstreamRequest
from tidewheel.gateway.output_parser import OutputParser, ToolCall, grammar_field
from tidewheel_client import Chunk, Completion, TokenLogprob

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_OPENAI_REASONS = ("stop", "length")

Json = dict[str, Any]
IndexedChunks = Sequence[tuple[int, Chunk]]  # with the index of the prompt
Logprobs = Sequence[Mapping[int, TokenLogprob]]  # by token


class Usage:
    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}  # by prompt
        self._cached: dict[int, int] = {}
        self.num_output = 0

    def add(self, index: int, chunk: Chunk) -> None:
        self._prompts[index] = chunk.num_input_tokens or 0
        self.num_output += chunk.num_output_tokens or 0
        if chunk.perf is not None and chunk.index == 0:  # the sequences share a prompt
            self._cached[index] = chunk.perf.num_cached_tokens

    @property
    def num_prompt(self) -> int:
        return sum(self._prompts.values())

    @property
    def num_cached(self) -> int:
        return sum(self._cached.values())

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


@dataclass(slots=True)
class _ChoiceState:
    parser: OutputParser
    text_offset: int = 0  # of the next token
    called: list[str] = field(default_factory=list)
    has_role: bool = False


class AnswerWriter:
    """Writer of an answer, whole or as a stream of events: here of bytes as they came, in subclasses of chunks."""

    content_type = "application/json"  # of a whole answer

    def __init__(self, request: UpstreamRequest) -> None:
        self.request = request
        self.called: list[str] = []  # functions that a complete answer calls

    def whole(self, parts: Sequence[tuple[int, Any]]) -> bytes:
        return b"".join(part for _, part in parts)

    def events(self, _: int, response: Any) -> bytes:
        """Return the events of a response to one of the prompts; empty while text is withheld."""
        return b"".join(response)

    def end(self) -> bytes:
        return b""

    def failed(self, error: bytes) -> bytes:
        """Return the last event of a stream after an error, given as the body of an answer would be."""
        return b"data: " + error + b"\n\n"


class TextWriter(AnswerWriter):
    def __init__(self, request: UpstreamRequest) -> None:
        super().__init__(request)
        body = request.body
        assert isinstance(body, GenerateBody)
        self._body = body
        self._is_chat = isinstance(body, ChatBody)
        self._options = body.stream_options or StreamOptions()
        self._num_logprobs: int | None = request.params.get("logprobs")
        self._usage = Usage()
        name, prefix = ("chat.completion", "chatcmpl") if self._is_chat else ("text_completion", "cmpl")
        self._head: Json = {
            "id": f"{prefix}-{request.request_id}",
            "object": f"{name}.chunk" if request.stream and self._is_chat else name,
            "created": int(time.time()),
            "model": request.model_id,
        }
        self._states: dict[int, _ChoiceState] = {}  # by choice
        self._prompt_logprobs: dict[int, Logprobs] = {}  # by prompt

    def whole(self, chunks: IndexedChunks) -> bytes:
        choices = []
        for index in range(len(self.request.prompts)):
            of_prompt = [chunk for other, chunk in chunks if other == index]
            choices += [self._choice(index, one) for one in Completion.of_sequences("", of_prompt)]
        for index, chunk in chunks:
            self._usage.add(index, chunk)
        body = {**self._head, "choices": choices, "usage": self._usage.as_json()}
        return msgspec.json.encode(self._with_prompt_of_chat(body))

    def events(self, index: int, response: list[Chunk]) -> bytes:
        return b"".join(self._chunk_event(index, chunk) for chunk in response)

    def end(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        return as_event({**self._head, "choices": [], "usage": self._usage.as_json()}) + DONE

    def _chunk_event(self, index: int, chunk: Chunk) -> bytes:
        self._usage.add(index, chunk)
        choice = self._choice(index, chunk)
        if choice.get("delta") == {} and not any(choice[key] for key in choice.keys() - {"index"}):
            return b""
        event = {**self._head, "choices": [choice]}
        if chunk.prompt_logprobs is not None:
            event = self._with_prompt_of_chat(event)
        if self._options.include_usage or self._options.continuous_usage_stats:
            event["usage"] = self._usage.as_json() if self._options.continuous_usage_stats else None
        return as_event(event)

    def _choice(self, index: int, part: Chunk | Completion) -> Json:
        number = index * self._body.n + part.index
        is_first = number not in self._states
        if is_first:
            self._states[number] = _ChoiceState(parser_of(self.request))
        state = self._states[number]
        if part.prompt_logprobs is not None:
            self._prompt_logprobs[index] = part.prompt_logprobs
        choice: Json = {"index": number, **self._content(part, state), "logprobs": None}
        of_prompt = self._prompt_logprobs.get(index, ()) if is_first else ()
        if part.logprobs is not None and self._num_logprobs is not None:
            entries = (*of_prompt, *part.logprobs) if self._body.echo else part.logprobs
            choice["logprobs"] = self._logprobs(entries, state)
        if of_prompt and self._body.prompt_logprobs is not None and not self._is_chat:
            choice["prompt_logprobs"] = _prompt_logprobs(of_prompt)
        choice |= _finish_reason(part.finish_reason)
        if choice["finish_reason"] == "stop" and state.called and not state.parser.was_cut:
            choice["finish_reason"] = "tool_calls"
            self.called += state.called
        if self._body.return_token_ids:
            choice["token_ids"] = part.token_ids or ()
        if part.perf is not None and part.perf.weights != "full":
            choice["weights"] = part.perf.weights
        return choice

    def _with_prompt_of_chat(self, body: Json) -> Json:
        if not self._is_chat or self._body.prompt_logprobs is None:
            return body
        return {**body, "prompt_logprobs": _prompt_logprobs(self._prompt_logprobs.get(0, ()))}

    def _content(self, part: Chunk | Completion, state: _ChoiceState) -> Json:
        if not self._is_chat:
            return {"text": part.text}
        output = state.parser.push(part.text)
        if part.finish_reason is not None:
            output += state.parser.end()
        calls = [self._call(call, state) for call in output.calls]
        parts = {"content": output.content, "reasoning_content": output.reasoning, "tool_calls": calls}
        fields = {name: value for name, value in parts.items() if value}
        if not self._body.stream:
            return {"message": {"role": "assistant", "content": None if calls else "", **fields}}
        if not state.has_role and (fields or part.finish_reason is not None):
            state.has_role = True
            fields = {"role": "assistant", **fields}
        return {"delta": fields}

    def _call(self, call: ToolCall, state: _ChoiceState) -> Json:
        named = {"name": call.name} if call.id else {}
        state.called += named.values()
        place = {"index": len(state.called) - 1} if self._body.stream else {}
        function = {"function": {**named, "arguments": call.arguments}}
        return {**place, "id": call.id, "type": "function", **function} if call.id else {**place, **function}

    def _logprobs(self, entries: Logprobs, state: _ChoiceState) -> Json:
        count = self._num_logprobs or 0
        if self._is_chat:
            return {"content": [_chat_logprob(entry, count) for entry in entries], "refusal": None}
        chosen = [_chosen(entry) for entry in entries]
        offsets = list(itertools.accumulate((len(one.decoded_token) for one in chosen), initial=state.text_offset))
        state.text_offset = offsets.pop()
        tops = [
            {one.decoded_token: _finite(one) for one in entry.values()} if _chosen(entry).rank else None
            for entry in entries
        ]
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(one) if one.rank else None for one in chosen],
            "tokens": [one.decoded_token for one in chosen],
            "top_logprobs": tops if count else None,
        }


def parser_of(request: UpstreamRequest) -> OutputParser:
    """Return a parser of one sequence. An answer in a grammar has no thoughts."""
    return OutputParser(request.calls, "off" if grammar_field(request.params) else request.reasoning)


def as_event(event: Json) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def as_typed_event(event: Json) -> bytes:
    return f"event: {event['type']}\n".encode() + as_event(event)


def _finish_reason(reason: str | None) -> Json:
    if reason is None or reason in _OPENAI_REASONS:
        return {"finish_reason": reason}
    return {"finish_reason": "length", "stop_reason": reason}


def _prompt_logprobs(entries: Logprobs) -> list[Json | None]:
    return [
        {
            str(token_id): {"logprob": _finite(one), "rank": one.rank, "decoded_token": one.decoded_token}
            for token_id, one in entry.items()
        }
        if _chosen(entry).rank
        else None
        for entry in entries
    ]


def _chosen(entry: Mapping[int, TokenLogprob]) -> TokenLogprob:
    return next(iter(entry.values()))  # the backend puts it first


def _finite(one: TokenLogprob) -> float:
    return max(one.logprob, _LEAST_LOGPROB)


def _chat_logprob(entry: Mapping[int, TokenLogprob], count: int) -> Json:
    tops = sorted((one for one in entry.values() if one.rank <= count), key=lambda one: one.rank)
    return {**_token(_chosen(entry)), "top_logprobs": [_token(one) for one in tops[:count]]}


def _token(one: TokenLogprob) -> Json:
    return {"token": one.decoded_token, "logprob": _finite(one), "bytes": list(one.decoded_token.encode())}


def prompt_usage(chunks: IndexedChunks) -> Json:
    """Return the usage of requests that generate nothing."""
    num_tokens = sum(chunk.num_input_tokens or 0 for _, chunk in chunks)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


class TokenizeWriter(AnswerWriter):
    def whole(self, chunks: IndexedChunks) -> bytes:
        return "".join(chunk.text for _, chunk in chunks).encode()  # JSON already


class DetokenizeWriter(TokenizeWriter):
    def whole(self, chunks: IndexedChunks) -> bytes:
        return msgspec.json.encode({"prompt": super().whole(chunks).decode()})
