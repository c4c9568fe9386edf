"""Requests of random token ids with seeded lengths, the same for every engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tidewheel.bench.workloads import WORKLOADS

HEADLINE_COUNT, HEADLINE_LOW, HEADLINE_HIGH = 256, 100, 1024
LAST_ID = 10_000
SHAREGPT_COUNT = 1000
TEMPERATURE = 0.6
Range = tuple[int, int]  # least and most tokens


@dataclass(frozen=True)
class WorkItem:
    input_ids: list[int]
    num_output_tokens: int


def mixed_lengths(count: int, inputs: Range, outputs: Range, seed: int = 0, vocab: int = LAST_ID) -> list[WorkItem]:
    """Return requests of which no two begin alike, so no prefix cache helps."""
    rng = random.Random(seed)
    return [
        WorkItem([rng.randrange(4, vocab) for _ in range(rng.randint(*inputs))], rng.randint(*outputs))
        for _ in range(count)
    ]


def headline(count: int = HEADLINE_COUNT, low: int = HEADLINE_LOW, high: int = HEADLINE_HIGH) -> list[WorkItem]:
    """Return prompts of `low` to `high` random ids and as many output tokens.

    Defaults give the published workload of nano-vllm and mini-sglang: 142,827 tokens in, 133,966 out.
    """
    rng = random.Random(0)
    prompts = [[rng.randint(0, LAST_ID) for _ in range(rng.randint(low, high))] for _ in range(count)]
    return [WorkItem(prompt, rng.randint(low, high)) for prompt in prompts]


def sharegpt(count: int = SHAREGPT_COUNT) -> list[WorkItem]:
    conversations = WORKLOADS["sharegpt"].conversations(0)
    turns = [next(conversations)[0] for _ in range(count)]
    return [WorkItem(turn.input_ids, turn.num_output_tokens) for turn in turns]


def of_length(count: int, num_input: int, num_output: int, vocab: int, seed: int = 0) -> list[WorkItem]:
    rng = random.Random(seed)
    return [WorkItem([rng.randrange(4, vocab) for _ in range(num_input)], num_output) for _ in range(count)]


def within_vocabulary(work: list[WorkItem], vocab: int) -> list[WorkItem]:
    return [WorkItem([token % vocab for token in item.input_ids], item.num_output_tokens) for item in work]
