"""Requests with seeded random lengths, the same for every engine."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkItem:
    input_ids: list[int]
    num_output_tokens: int


def mixed_lengths(
    count: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int = 0, vocab: int = 10_000
) -> list[WorkItem]:
    """Return requests of random ids; `inputs` and `outputs` are the shortest and longest length.

    No two prompts are alike, so no prefix cache helps.
    """
    rng = random.Random(seed)
    return [
        WorkItem([rng.randrange(4, vocab) for _ in range(rng.randint(*inputs))], rng.randint(*outputs))
        for _ in range(count)
    ]
