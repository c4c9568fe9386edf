"""Greedy streams that go on at another server when theirs is lost.

The gateway keeps the token ids of the answer. The next server reads the prompt and these, and writes the rest. Which
server does makes no difference to a greedy answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec
from tritonclient.grpc import service_pb2 as pb

from tidewheel.gateway.bodies import Ask
from tidewheel.gateway.course import Course
from tidewheel.gateway.order import GrpcOrder
from tidewheel.gateway.upstream import Upstream
from tidewheel_client import Chunk
from tidewheel_client.request_errors import EngineDead

MAX_MOVES = 3  # after the first news: a request that kills engines ends
_INCOMPLETE = "�"  # of bytes that are no character, or not yet
_OF_PROMPT = ("add_special_tokens", "add_generation_prompt")
_OF_TOKENIZING = (*_OF_PROMPT, "priority", "tenant", "deadline_ms", "soft_deadline_ms")
# Parameters whose meaning for the rest of an answer does not depend on what is written. A request with any other does
# not go on: stop strings and words may be half written, and penalties count the answer's tokens.
_CARRIED = frozenset(
    {
        *_OF_TOKENIZING,
        *("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "repetition_penalty"),
        *("ignore_eos", "skip_special_tokens", "stop_token_ids", "logit_bias", "allowed_token_ids"),
        *("session_id", "session_ttl_s", "cache_salt", "return_token_ids", "return_perf_metrics"),
    }
)
_NEUTRAL = {"n": 1, "return_logprobs": False, "stop": []}


def may_go_on(ask: Ask) -> bool:
    """Return whether the rest of an answer is known from its prompt and the tokens so far."""
    params = ask.params
    is_greedy = params.get("temperature") in (0, 0.0) and params.get("temperature") is not False
    return (
        ask.stream
        and is_greedy
        and len(ask.prompts) == 1
        and all(_is_count(params.get(name, 1)) for name in ("max_tokens", "min_tokens"))
        and "max_tokens" in params  # or an entry's default counts, which the gateway does not know
        and all(name in _CARRIED or _NEUTRAL.get(name, ...) == value for name, value in params.items())
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class GreedyOrder(GrpcOrder):
    """One whose answer may go on elsewhere: `may_go_on`."""

    @property
    def max_tokens(self) -> int:
        return int(str(self.ask.params["max_tokens"]))

    def _encode(self, params: Mapping[str, object]) -> pb.ModelInferRequest:
        return super()._encode({**params, "return_token_ids": True})

    def encode_tokenizing(self) -> pb.ModelInferRequest:
        """Ask for the prompt's tokens. Raise `DeadlineExceeded`."""
        params = {name: value for name, value in self.params_left().items() if name in _OF_TOKENIZING}
        prompt = {**self.prompt, "task": "tokenize"}
        return GrpcOrder(self.ask._replace(stream=False, params=params), self.request_id, prompt).encode()

    def encode_rest(self, prompt_ids: Sequence[int], written: Sequence[int]) -> pb.ModelInferRequest:
        """Ask for what comes behind the written tokens. Raise `DeadlineExceeded`."""
        params = {name: value for name, value in self.params_left().items() if name not in _OF_PROMPT}
        for name in ("max_tokens", "min_tokens"):
            if name in params:
                params[name] = max(int(str(params[name])) - len(written), 0)
        return dataclasses.replace(self, prompt={"input_ids": [*prompt_ids, *written]})._encode(params)


class Written:
    """Output that a client has."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.num_whole = 0  # leading tokens whose text is known to be passed on, and no part of the next one's
        self.text = ""  # behind them

    def add(self, chunk: Chunk) -> None:
        token_ids = chunk.token_ids or ()
        self.token_ids += token_ids
        self.text += chunk.text
        # One token that brings text brings all. Of several, the last may be the beginning of a character.
        is_whole = len(token_ids) == 1 and chunk.text and _INCOMPLETE not in chunk.text
        if is_whole and len(self.token_ids) < self._max_tokens:
            self.num_whole, self.text = len(self.token_ids), ""

    @property
    def whole(self) -> list[int]:
        return self.token_ids[: self.num_whole]


class _Rest:
    """News of a server that writes on: without what the client has, and counted from the answer's beginning."""

    def __init__(self, written: Written, num_prompt: int) -> None:
        self._num_whole = written.num_whole
        self._num_prompt = num_prompt
        self._ids = tuple(written.token_ids[written.num_whole :])
        self._text = written.text

    def take(self, chunk: Chunk) -> Chunk | None:
        """Return what is new of it. Raise `EngineDead` if it differs from what the client has."""
        token_ids = chunk.token_ids or ()
        num_ids, num_chars = min(len(token_ids), len(self._ids)), min(len(chunk.text), len(self._text))
        differs = token_ids[:num_ids] != self._ids[:num_ids] or chunk.text[:num_chars] != self._text[:num_chars]
        self._ids, self._text = self._ids[num_ids:], self._text[num_chars:]
        num_prompt = (chunk.num_input_tokens or 0) - self._num_whole
        is_over = chunk.finish_reason is not None
        if differs or num_prompt != self._num_prompt or (is_over and (self._ids or self._text)):
            raise EngineDead("the server was lost while it answered, and another one writes something else")
        new = dataclasses.replace(
            chunk,
            text=chunk.text[num_chars:],
            token_ids=token_ids[num_ids:],
            num_output_tokens=len(token_ids) - num_ids,
            num_input_tokens=num_prompt,
            perf=chunk.perf
            and dataclasses.replace(chunk.perf, num_cached_tokens=min(chunk.perf.num_cached_tokens, num_prompt)),
        )
        return new if is_over or new.text or new.token_ids else None


class GreedyCourse(Course[pb.ModelInferRequest, list[Chunk]]):
    """One that goes on at the next server."""

    order: GreedyOrder

    def __init__(self, order: GreedyOrder, request: pb.ModelInferRequest) -> None:
        super().__init__(order, request, Upstream.stream)
        self._written = Written(order.max_tokens)
        self._num_prompt = 0  # tokens
        self._num_moves = 0
        self._prompt_ids: list[int] = []  # once they were needed

    @property
    def may_move(self) -> bool:
        return self._num_moves < MAX_MOVES or not self.has_begun

    def move(self) -> None:
        self._num_moves += self.has_begun
        super().move()

    async def send(self, upstream: Upstream) -> AsyncGenerator[list[Chunk]]:
        if not self.has_begun:
            async with contextlib.aclosing(super().send(upstream)) as responses:
                async for chunks in responses:
                    yield chunks
                    self._note(chunks)  # as it was passed on
            return
        rest = _Rest(self._written, self._num_prompt)
        if whole := self._written.whole:
            self._request = self.order.encode_rest(await self._read_prompt(upstream), whole)
        async with contextlib.aclosing(super().send(upstream)) as responses:
            async for chunks in responses:
                if new := [one for one in map(rest.take, chunks) if one is not None]:
                    yield new
                    self._note(new)

    def _note(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._written.add(chunk)
            self._num_prompt = chunk.num_input_tokens or 0

    async def _read_prompt(self, upstream: Upstream) -> Sequence[int]:
        """Return the prompt's tokens, as the server reads them."""
        if (given := self.order.prompt.get("input_ids")) is not None:
            return given  # type: ignore[return-value]  # the backend has taken it
        if not self._prompt_ids:
            request = self.order.encode_tokenizing()
            async with contextlib.aclosing(upstream.stream(request)) as responses:
                text = "".join([chunk.text async for chunks in responses for chunk in chunks])
            self._prompt_ids = msgspec.json.decode(text, type=_Tokens).tokens
        return self._prompt_ids


class _Tokens(msgspec.Struct):
    tokens: list[int]
