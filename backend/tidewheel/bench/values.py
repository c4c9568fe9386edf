"""A request that is offered, what became of it, and the objective that it is held against."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNANSWERED = "UNANSWERED"  # cut off by the end of the run
TIMEOUT = "TIMEOUT"  # the client's own limit passed
UNREADABLE = "UNREADABLE"  # not what the protocol says

_TAG = re.compile(r"\[(TW-[A-Z-]+)")


@dataclass(frozen=True, slots=True)
class Offered:
    """One request: when it is sent, and what it asks for.

    Requests come in conversations, mostly of one turn. A later turn is sent `think_s` after the answer to the one
    before, and its prompt is all that was said, then `input_ids`.
    """

    at: float  # seconds from the start of the run, of a first turn in an open loop
    input_ids: list[int]
    num_output_tokens: int
    parameters: Mapping[str, Any] = field(default_factory=dict)  # priority, tenant, session_id, deadline_ms, …
    think_s: float = 0.0


Conversation = tuple[Offered, ...]


@dataclass(slots=True)
class Outcome:
    """What became of it. Times in seconds from its own sending; None: it never happened."""

    offered: Offered
    sent: float  # seconds from the start of the run
    lag: float = 0.0  # seconds that it was sent late: the client's fault, not the server's
    num_prompt_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)  # (arrival, tokens in it)
    token_ids: list[int] = field(default_factory=list)  # when the target gives them
    finish_reason: str = ""
    ended: float | None = None  # by its last token or an error
    error: str = ""  # the message of the server
    code: str = ""  # of the error
    streamed: bool = True  # whether tokens came as they were made
    origin: float = 0.0  # perf_counter at the sending

    def add_tokens(self, count: int) -> None:
        """`count` tokens have arrived just now."""
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
        """Answered without an error, and as long as was asked for."""
        return not self.error and self.num_tokens >= self.offered.num_output_tokens

    @property
    def latency(self) -> float | None:
        """To the last token."""
        return self.last_token

    @property
    def tpot(self) -> float | None:
        """Mean time between output tokens. None for one token, and for an answer that came in one piece."""
        if not self.streamed or self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    def inter_token_latencies(self) -> list[float]:
        """Gap before each token after the first; tokens that came together share the gap before them evenly."""
        gaps: list[float] = []
        for (before, _), (now, count) in zip(self.chunks, self.chunks[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps

    def is_good(self, ttft_s: float, tpot_s: float) -> bool:
        """Answered in full, within the service-level objective."""
        if self.first_token is None or not self.is_complete:
            return False
        return self.first_token <= ttft_s and (self.tpot is None or self.tpot <= tpot_s)


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objective of one request, in seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1

    def is_met(self, outcome: Outcome) -> bool:
        return outcome.is_good(self.ttft_s, self.tpot_s)

    def is_met_at_end(self, outcome: Outcome) -> bool:
        """Whether the whole answer was there by the time at which a stream just within the objective ends.

        The objective for targets that give their answer in one piece: they are not held to the first token.
        """
        if outcome.last_token is None or not outcome.is_complete:
            return False
        return outcome.last_token <= self.ttft_s + self.tpot_s * (outcome.offered.num_output_tokens - 1)


def error_code(code: str, message: str) -> str:
    """The tag of a message of ours, which says more than a status."""
    match = _TAG.search(message)
    return match[1] if match else code
