"""Requests with seeded random lengths, the same for every engine."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkItem:
    input_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True)
class Lengths:
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def mixed_lengths(
    count: int, inputs: Lengths, outputs: Lengths, seed: int = 0, vocab: int = 10_000
) -> list[WorkItem]:
    """Return requests of random ids, no two prompts alike, so no prefix cache helps."""
    rng = random.Random(seed)
    return [
        WorkItem([rng.randrange(4, vocab) for _ in range(inputs.draw(rng))], outputs.draw(rng)) for _ in range(count)
    ]
