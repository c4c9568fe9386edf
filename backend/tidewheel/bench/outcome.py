import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.stats import Objective

UNANSWERED = "UNANSWERED"  # the run ended first
TIMEOUT = "TIMEOUT"
UNREADABLE = "UNREADABLE"  # breaks the protocol

_TAG = re.compile(r"\[(TW-[A-Z-]+)")


class RequestFailed(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class OfferedRequest:
    """Turn of a conversation: a request with all earlier turns and answers, then `input_ids`."""

    at: float  # seconds from the start; first turns of an open loop
    input_ids: list[int]
    num_output_tokens: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    think_s: float = 0.0
    entry: str = ""  # one-shot model that is asked, with its own tensors; empty: the language model

    @property
    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": self.num_output_tokens, "temperature": 0, "ignore_eos": True, **self.parameters}


Conversation = tuple[OfferedRequest, ...]


@dataclass(slots=True)
class RequestOutcome:
    offered: OfferedRequest
    sent: float  # seconds from the start
    lag: float = 0.0  # seconds late, by the client's fault
    num_prompt_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)  # (arrival, tokens)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    ended: float | None = None
    error: str = ""
    code: str = ""
    streamed: bool = True  # False: all tokens at once
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
        return not self.error and self.num_tokens >= self.offered.num_output_tokens

    @property
    def latency(self) -> float | None:
        return self.last_token

    @property
    def tpot(self) -> float | None:
        """Mean time between tokens in seconds; None with fewer than two tokens, or unstreamed."""
        if not self.streamed or self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    def inter_token_latencies(self) -> list[float]:
        gaps: list[float] = []
        for (before, _), (now, count) in zip(self.chunks, self.chunks[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps


@dataclass(frozen=True, slots=True)
class Slo(Objective):
    def is_met(self, outcome: RequestOutcome) -> bool:
        """Return whether TTFT and TPOT meet the objective; the TTFT of an unstreamed answer is its whole time."""
        if outcome.first_token is None or not outcome.is_complete:
            return False
        return outcome.first_token <= self.ttft_s and (outcome.tpot is None or outcome.tpot <= self.tpot_s)

    def is_met_at_end(self, outcome: RequestOutcome) -> bool:
        if outcome.last_token is None or not outcome.is_complete:
            return False
        return outcome.last_token <= self.whole_answer_s(outcome.offered.num_output_tokens)


def error_code(code: str, message: str) -> str:
    match = _TAG.search(message)
    return match[1] if match else code


def words(input_ids: Sequence[int]) -> str:
    return " ".join(f"t{token_id}" for token_id in input_ids)
