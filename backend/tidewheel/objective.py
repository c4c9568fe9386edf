"""Objective of an answer, by which benchmark and server tell goodput from throughput."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_TTFT_S, DEFAULT_TPOT_S = 1.0, 0.1


@dataclass(frozen=True, slots=True)
class Objective:
    """Times to the first token and for each later one, in seconds."""

    ttft_s: float = DEFAULT_TTFT_S
    tpot_s: float = DEFAULT_TPOT_S

    def whole_answer_s(self, num_output_tokens: int) -> float:
        """Return when a stream just within the objective has all tokens."""
        return self.ttft_s + self.tpot_s * max(num_output_tokens - 1, 0)
