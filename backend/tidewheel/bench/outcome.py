"""Requests, outcomes and objectives."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UNANSWERED = "UNANSWERED"  # the run ended first
TIMEOUT = "TIMEOUT"  # client's limit
UNREADABLE = "UNREADABLE"  # breaks the protocol

_TAG = re.compile(r"\[(TW-[A-Z-]+)")


class RequestFailed(Exception):
    """Failed request. `code` groups errors in reports; `message` is the server's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Offered:
    """Request to send.

    Conversations mostly have one turn. A later turn follows `think_s` after an answer; its prompt is the
    conversation, then `input_ids`.
    """

    at: float  # seconds from the start, for first turns of an open loop
    input_ids: list[int]
    num_output_tokens: int
    parameters: Mapping[str, Any] = field(default_factory=dict)  # priority, tenant, session_id, deadline_ms, …
    think_s: float = 0.0


Conversation = tuple[Offered, ...]


@dataclass(slots=True)
class Outcome:
    """Outcome of a request; times in seconds from its sending, None if never reached."""

    offered: Offered
    sent: float  # seconds from the start
    lag: float = 0.0  # seconds sent late, by the client's fault
    num_prompt_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)  # (arrival, tokens)
    token_ids: list[int] = field(default_factory=list)  # if given
    finish_reason: str = ""
    ended: float | None = None  # at last token or error
    error: str = ""  # server's message
    code: str = ""
    streamed: bool = True  # tokens came as they were made
    origin: float = 0.0  # perf_counter

    def add_tokens(self, count: int) -> None:
        if count < 1:
            return
        elapsed = time.perf_counter() - self.origin
        if self.first_token is None:
            self.first_token = elapsed
        self.last_token = elapsed
        self.num_tokens += count
        self.chunks.append((elapsed, count))

    def fail(self, code: str, message: str) -> None:
        self.error, self.code = message, error_code(code, message)
        self.ended = time.perf_counter() - self.origin

    def finish(self, reason: str = "") -> None:
        self.finish_reason = reason or self.finish_reason or "length"
        self.ended = time.perf_counter() - self.origin

    @property
    def is_complete(self) -> bool:
        """Full answer, without an error."""
        return not self.error and self.num_tokens >= self.offered.num_output_tokens

    @property
    def latency(self) -> float | None:
        return self.last_token

    @property
    def tpot(self) -> float | None:
        """Mean time between output tokens; None below two tokens or for an answer in one piece."""
        if not self.streamed or self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    def inter_token_latencies(self) -> list[float]:
        """Return gaps before tokens after the first; tokens that arrive together split the gap."""
        gaps: list[float] = []
        for (before, _), (now, count) in zip(self.chunks, self.chunks[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps

    def is_good(self, ttft_s: float, tpot_s: float) -> bool:
        if self.first_token is None or not self.is_complete:
            return False
        return self.first_token <= ttft_s and (self.tpot is None or self.tpot <= tpot_s)


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objective, in seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1

    def is_met(self, outcome: Outcome) -> bool:
        return outcome.is_good(self.ttft_s, self.tpot_s)

    def is_met_at_end(self, outcome: Outcome) -> bool:
        """Return whether the answer ended by the time a stream just within the objective does.

        For answers in one piece, which are not held to the first token.
        """
        if outcome.last_token is None or not outcome.is_complete:
            return False
        return outcome.last_token <= self.ttft_s + self.tpot_s * (outcome.offered.num_output_tokens - 1)


def error_code(code: str, message: str) -> str:
    """Return Tidewheel's tag, which says more than a status."""
    match = _TAG.search(message)
    return match[1] if match else code


def words(input_ids: Sequence[int]) -> str:
    """Return a word per id, some tokens each, for targets without ids."""
    return " ".join(f"t{token_id}" for token_id in input_ids)
