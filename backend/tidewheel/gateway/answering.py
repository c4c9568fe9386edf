"""Answers in OpenAI's shapes: whole, and as the events of a stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tidewheel.gateway.bodies import Ask
from tidewheel.gateway.spoken import Listener, Reasoning, Spoken, ToolCall
from tidewheel_client import Chunk, Completion, TokenLogprob

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # JSON has no infinity
_OPENAI_REASONS = ("stop", "length")

Json = dict[str, Any]
Logprobs = Sequence[Mapping[int, TokenLogprob]]  # by token


class Usage:
    """Tokens of one request to the gateway."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}  # by number of the prompt
        self._cached: dict[int, int] = {}
        self._completion = 0

    def add(self, number: int, chunk: Chunk) -> None:
        self._prompts[number] = chunk.num_input_tokens or 0
        self._completion += chunk.num_output_tokens or 0
        if chunk.perf is not None and chunk.index == 0:  # later sequences find what the first computed
            self._cached[number] = chunk.perf.num_cached_tokens

    def as_json(self) -> Json:
        prompt = sum(self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


@dataclass(slots=True)
class _Progress:
    """State of one choice."""

    listener: Listener
    text_offset: int = 0  # of the next token, in the joined texts of tokens
    num_calls: int = 0
    has_begun: bool = False  # the role was sent


class Answer:
    """Writer of the answer to one request."""

    def __init__(self, ask: Ask, request_id: str, reasoning: Reasoning) -> None:
        self._ask = ask
        self._reasoning = reasoning
        self._usage = Usage()
        name, prefix = ("chat.completion", "chatcmpl") if ask.is_chat else ("text_completion", "cmpl")
        if ask.stream and ask.is_chat:
            name += ".chunk"
        self._head: Json = {
            "id": f"{prefix}-{request_id}",
            "object": name,
            "created": int(time.time()),
            "model": ask.model,
        }
        self._progress: dict[int, _Progress] = {}  # by choice
        self._prompt_logprobs: dict[int, Logprobs] = {}  # by number of the prompt

    def whole(self, chunks: Sequence[tuple[int, Chunk]]) -> bytes:
        """Return the answer. Each chunk comes with the number of its prompt."""
        choices = []
        for number in range(len(self._ask.prompts)):
            own = [chunk for other, chunk in chunks if other == number]
            choices += [self._choice(number, one) for one in Completion.of_sequences("", own)]
        for number, chunk in chunks:
            self._usage.add(number, chunk)
        body = {**self._head, "choices": choices, "usage": self._usage.as_json()}
        return msgspec.json.encode(self._with_prompt_of_chat(body))

    def events(self, number: int, chunks: Sequence[Chunk]) -> bytes:
        """Return an event for each chunk of a prompt."""
        return b"".join(self._event(number, chunk) for chunk in chunks)

    def end(self) -> bytes:
        """Return the events behind the last chunk."""
        if not self._ask.stream_options.include_usage:
            return DONE
        return _event({**self._head, "choices": [], "usage": self._usage.as_json()}) + DONE

    def _event(self, number: int, chunk: Chunk) -> bytes:
        self._usage.add(number, chunk)
        choice = self._choice(number, chunk)
        if choice.get("delta") == {} and not any(choice[key] for key in choice.keys() - {"index"}):
            return b""  # the text is held back
        event = {**self._head, "choices": [choice]}
        if chunk.prompt_logprobs is not None:
            event = self._with_prompt_of_chat(event)
        options = self._ask.stream_options
        if options.include_usage or options.continuous_usage_stats:
            event["usage"] = self._usage.as_json() if options.continuous_usage_stats else None
        return _event(event)

    def _choice(self, number: int, part: Chunk | Completion) -> Json:
        index = number * self._ask.n + part.index
        progress = self._progress.get(index)
        is_first = progress is None
        if progress is None:
            reasoning = "off" if self._ask.follows_grammar else self._reasoning
            progress = self._progress[index] = _Progress(
                Listener(self._ask.tools, reasoning, is_forced=bool(self._ask.schema_name))
            )
        if part.prompt_logprobs is not None:
            self._prompt_logprobs[number] = part.prompt_logprobs
        choice: Json = {"index": index, **self._content(part, progress), "logprobs": None}
        of_prompt = self._prompt_logprobs.get(number, ()) if is_first else ()
        if part.logprobs is not None and self._ask.top_logprobs is not None:
            entries = (*of_prompt, *part.logprobs) if self._ask.has_echo else part.logprobs
            choice["logprobs"] = self._logprobs(entries, progress)
        if of_prompt and self._ask.shows_prompt_logprobs and not self._ask.is_chat:
            choice["prompt_logprobs"] = _shown(of_prompt)
        choice |= _end(part.finish_reason)
        if choice["finish_reason"] == "stop" and progress.num_calls and not progress.listener.was_cut:
            choice["finish_reason"] = "tool_calls"
        if self._ask.params["return_token_ids"]:
            choice["token_ids"] = part.token_ids or ()
        return choice

    def _with_prompt_of_chat(self, body: Json) -> Json:
        """Add the log-probabilities of the prompt, which has no choice of its own."""
        if not self._ask.is_chat or not self._ask.shows_prompt_logprobs:
            return body
        return {**body, "prompt_logprobs": _shown(self._prompt_logprobs.get(0, ()))}

    def _content(self, part: Chunk | Completion, progress: _Progress) -> Json:
        if not self._ask.is_chat:
            return {"text": part.text}
        spoken = progress.listener.push(part.text)
        if part.finish_reason is not None:
            spoken += progress.listener.end()
        said = self._said(spoken, progress)
        if not self._ask.stream:
            return {"message": {"role": "assistant", "content": None if spoken.calls else "", **said}}
        if not said and part.finish_reason is None:
            return {"delta": {}}
        role = {} if progress.has_begun else {"role": "assistant"}
        progress.has_begun = True
        return {"delta": {**role, **said}}

    def _said(self, spoken: Spoken, progress: _Progress) -> Json:
        said: Json = {"content": spoken.content} if spoken.content else {}
        if spoken.reasoning:
            said["reasoning_content"] = spoken.reasoning
        first = progress.num_calls
        calls = spoken.calls[: max(1 - first, 0)] if self._ask.has_one_call else spoken.calls
        progress.num_calls += len(calls)
        if calls:
            said["tool_calls"] = [self._call(one, number) for number, one in enumerate(calls, start=first)]
        return said

    def _call(self, call: ToolCall, number: int) -> Json:
        place = {"index": number} if self._ask.stream else {}
        function = {"name": call.name, "arguments": call.arguments}
        return {**place, "id": call.id, "type": "function", "function": function}

    def _logprobs(self, entries: Logprobs, progress: _Progress) -> Json:
        count = self._ask.top_logprobs or 0
        if self._ask.is_chat:
            return {"content": [_chat_logprob(entry, count) for entry in entries], "refusal": None}
        chosen = [_chosen(entry) for entry in entries]
        offsets = list(itertools.accumulate((len(one.decoded_token) for one in chosen), initial=progress.text_offset))
        progress.text_offset = offsets.pop()
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


def _event(event: Json) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def _end(reason: str | None) -> Json:
    """Return the reason in OpenAI's words: an answer that a deadline cut has `length`, and says so beside it."""
    if reason is None or reason in _OPENAI_REASONS:
        return {"finish_reason": reason}
    return {"finish_reason": "length", "stop_reason": reason}


def _shown(entries: Logprobs) -> list[Json | None]:
    """Return log-probabilities of a prompt as vLLM's server does: null for the first token."""
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
