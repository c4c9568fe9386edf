"""Requests and loops that lead a runner through every kind of decode step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from support.models import tiny_models
from support.runner.step_loop import GREEDY, StepLoop, request
from support.scheduler.invariants import check_invariants
from tidewheel.request import Request
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.sampling import SamplingParams

KINDS = {
    "greedy": [GREEDY],
    "drawn": [SamplingParams(temperature=1.0)],
    "filtered": [
        GREEDY,
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=0.9, top_p=0.8, min_p=0.05),
    ],
    "everything": [
        GREEDY,
        SamplingParams(temperature=0.7, top_p=0.8, min_p=0.05, logprobs=3),
        SamplingParams(temperature=1.1, repetition_penalty=1.4, logit_bias={3: 5.0}),
        SamplingParams(temperature=0.0, presence_penalty=0.5, min_tokens=4),
    ],
}


Words = tuple[tuple[int, ...], ...]


def pairs_of(outputs: Sequence[Sequence[int]]) -> Words:
    """Return the second and third token of each output: forbidding these words changes what follows."""
    return tuple({(tokens[1], tokens[2]) for tokens in outputs})


class PipelinedLoop(StepLoop):
    """A loop with two steps in flight: a step is launched before the tokens of the last are applied."""

    def __init__(self, runner: ModelRunner, **settings: object) -> None:
        super().__init__(runner, max_inflight_steps=2, **settings)

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        for item in requests:
            self.scheduler.add_group([item], 0.0)
        in_flight, now = deque(), 0.0
        while self.scheduler.has_unfinished or in_flight:
            batch = self.scheduler.schedule(now)
            if batch is not None:
                in_flight.append((batch, self.runner.launch(batch)))
            if batch is None or len(in_flight) == 2:
                done, pending = in_flight.popleft()
                self.scheduler.apply(done, pending.wait(), now)
            now += 1.0
        check_invariants(self.scheduler)
        return [item.output_token_ids for item in requests]


LOOPS = {"one step in flight": StepLoop, "two steps in flight": PipelinedLoop}


def workload(kinds: Sequence[SamplingParams], count: int = 24, *, seed: int = 0, words: Words = ()) -> list[Request]:
    """Make requests of many lengths, so that rows come and go.

    Every third shares the beginning of its prompt, and every second must not complete the words.
    """
    generator = np.random.default_rng(seed)
    prompts = tiny_models.prompts(count, 1, 40, seed=seed)
    shared = tiny_models.prompts(1, 33, 33, seed=seed + 1)[0]
    return [
        request(
            f"r{i}", np.concatenate((shared, prompt)) if i % 3 == 0 else prompt, int(generator.integers(4, 18)),
            kinds[i % len(kinds)], seed=i, bad_words_ids=words if i % 2 else (),
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def decoding(count: int, sampling: SamplingParams = GREEDY) -> list[Request]:
    """Make requests that start together, and end together after seven decodes."""
    prompts = tiny_models.prompts(count, 3, 30, seed=count)
    return [request(f"r{i}", prompt, 8, sampling, seed=i) for i, prompt in enumerate(prompts)]
