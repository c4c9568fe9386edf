"""Completions that stream over HTTP, many at once: one client for servers that speak differently."""

from __future__ import annotations

import json
import select
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from common.stream_readers import connected, http_post

STALL_S = 120.0


class Dialect(Protocol):
    """How a server is asked, and what its events say."""

    def request(self, prompt: str, num_tokens: int) -> tuple[str, Mapping[str, object]]:
        """Return path and body of a greedy completion that ignores ends of sequence."""

    def num_tokens(self, event: Mapping[str, Any]) -> int: ...

    def num_prompt_tokens(self, event: Mapping[str, Any]) -> int:
        """Return the prompt's length if the event says it, else 0."""


class LlamaDialect:
    """llama.cpp's `/completion`."""

    def request(self, prompt: str, num_tokens: int) -> tuple[str, Mapping[str, object]]:
        body = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "ignore_eos": True}
        return "/completion", body | {"stream": True, "return_tokens": True, "cache_prompt": False}

    def num_tokens(self, event: Mapping[str, Any]) -> int:
        return 0 if event.get("stop") else len(event["tokens"])

    def num_prompt_tokens(self, event: Mapping[str, Any]) -> int:
        return int(event.get("tokens_evaluated", 0))


class TritonDialect:
    """`/generate_stream` of a model of ours."""

    def __init__(self, model: str) -> None:
        self._path = f"/v2/models/{model}/generate_stream"

    def request(self, prompt: str, num_tokens: int) -> tuple[str, Mapping[str, object]]:
        body = {"text_input": prompt, "stream": True, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        return self._path, body | {"return_num_output_tokens": True, "return_num_input_tokens": True}

    def num_tokens(self, event: Mapping[str, Any]) -> int:
        return int(event["num_output_tokens"])

    def num_prompt_tokens(self, event: Mapping[str, Any]) -> int:
        return int(event["num_input_tokens"])


class StreamsRun(NamedTuple):
    num_tokens: int  # of output, of all streams
    seconds: float  # from the first request to the last token
    first_s: list[float]  # to the first token, by stream
    gaps_s: list[float]  # between events of a stream
    prompt_tokens: list[int]  # by stream

    @property
    def figures(self) -> dict[str, float]:
        """Return tokens/s, milliseconds to the first token and between events, and the prompts' mean length."""
        gaps = sorted(self.gaps_s) or [0.0]
        return {
            "tokens_per_s": self.num_tokens / self.seconds,
            "first_token_ms": 1e3 * statistics.median(self.first_s),
            "gap_p50_ms": 1e3 * gaps[len(gaps) // 2],
            "gap_p99_ms": 1e3 * gaps[len(gaps) * 99 // 100],
            "step_ms": 1e3 * (self.seconds - min(self.first_s)) * len(self.first_s) / self._num_later,
            "prompt_tokens": statistics.mean(self.prompt_tokens or [0]),
        }

    @property
    def _num_later(self) -> int:
        return max(self.num_tokens - len(self.first_s), 1)


class _Stream:
    def __init__(self, address: str, dialect: Dialect, prompt: str, num_tokens: int) -> None:
        self._dialect = dialect
        self._request = http_post(*dialect.request(prompt, num_tokens))
        self._rest = b""
        self.num_left = num_tokens
        self.num_prompt_tokens = 0
        self.first = self.last = 0.0
        self.socket = connected(address)

    def send(self) -> None:
        self.socket.sendall(self._request)

    def read(self, now: float) -> Iterator[float]:
        """Yield seconds since the last tokens, for each event but the first. Raise `RuntimeError` for an error."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise RuntimeError(f"the server closed a stream that lacks {self.num_left} tokens: {self._rest[:500]!r}")
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            head, mark, body = event.partition(b"data: ")
            if not mark or b'"error"' in event:
                raise RuntimeError((head + body).decode())
            fields = json.loads(body)
            self.num_prompt_tokens = self.num_prompt_tokens or self._dialect.num_prompt_tokens(fields)
            if count := self._dialect.num_tokens(fields):
                self.num_left -= count
                if self.first:
                    yield now - self.last
                self.first, self.last = self.first or now, now


def run_streams(address: str, dialect: Dialect, prompts: Sequence[str], num_tokens: int) -> StreamsRun:
    """Send all prompts at once, and read until each has so many tokens. Raise `RuntimeError` if a server stalls."""
    streams = [_Stream(address, dialect, prompt, num_tokens) for prompt in prompts]
    by_descriptor = {stream.socket.fileno(): stream for stream in streams}
    poll = select.epoll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    began = time.monotonic()
    for stream in streams:
        stream.send()
    gaps: list[float] = []
    while any(stream.num_left > 0 for stream in streams):
        ready = poll.poll(STALL_S)
        if not ready:
            raise RuntimeError(f"no token for {STALL_S:g} s")
        now = time.monotonic()
        for descriptor, _ in ready:
            gaps += by_descriptor[descriptor].read(now)
            if by_descriptor[descriptor].num_left <= 0:
                poll.unregister(descriptor)
    for stream in streams:
        stream.socket.close()
    return StreamsRun(
        num_tokens * len(streams),
        max(stream.last for stream in streams) - began,
        [stream.first - began for stream in streams],
        gaps,
        [stream.num_prompt_tokens for stream in streams if stream.num_prompt_tokens],
    )
