"""Random loads of two runners that must compute the same, up to the first token that rounding may decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from support.models import tiny_models
from support.models.tiny_models import MARGIN
from support.runner.step_loop import StepLoop, request
from tidewheel.batch import StepOutputs
from tidewheel.request import Request
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.sampling import SamplingParams

WITH_MARGIN = SamplingParams(temperature=0.0, logprobs=2)


class MarginLoop(StepLoop):
    """A loop that keeps by how much the best logit of each token exceeds the next."""

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        self.margins: dict[str, list[float]] = {item.request_id: [] for item in requests}
        apply = self.scheduler.apply

        def noted(*arguments: Any) -> StepOutputs:
            outputs = apply(*arguments)
            for index, entry in (outputs.logprobs or {}).items():
                first, second = entry.top_logprobs[:2]
                self.margins[outputs.requests[index].request_id].append(first - second)
            return outputs

        self.scheduler.apply = noted
        return super().run(requests)


def random_load(seed: int) -> tuple[list[Request], dict[str, object]]:
    """Return random requests, some with one prompt, and settings of a loop that cuts, preempts, swaps and hits."""
    random = np.random.default_rng(seed)
    shared = tiny_models.prompts(1, 33, 33, seed=seed)[0]
    requests: list[Request] = []
    for number, prompt in enumerate(tiny_models.prompts(int(random.integers(2, 9)), 1, 50, seed=seed + 1)):
        whole = np.concatenate((shared, prompt)) if random.random() < 0.5 else prompt
        leader = request(f"r{number}", whole, int(random.integers(1, 16)), WITH_MARGIN)
        others = range(int(random.integers(0, 3)))
        requests += [leader, *(request(f"r{number}.{i}", whole, 8, WITH_MARGIN, leader=leader) for i in others)]
    swaps = bool(random.random() < 0.5)
    return requests, {
        "num_blocks": int(random.integers(10, 24)),
        "token_budget": int(random.integers(20, 200)),
        "num_host_blocks": 16 if swaps else 0,
        "preemption_mode": "swap" if swaps else "recompute",
    }


def clear_up_to(margins: Sequence[float]) -> int:
    """Return the first token at which rounding may decide."""
    return next((index for index, margin in enumerate(margins) if margin < MARGIN), len(margins))


def compared_loads(one: ModelRunner, other: ModelRunner, seed: int) -> Counter[str]:
    """Run a load on both, compare its tokens where they are clear, and return what happened."""
    requests, changes = random_load(seed)
    loop, ranked = MarginLoop(one, **changes), StepLoop(other, **changes)
    expected, found = loop.run(requests), ranked.run(random_load(seed)[0])
    totals = Counter[str]()
    for item, tokens, others in zip(requests, expected, found, strict=True):
        count = clear_up_to(loop.margins[item.request_id])
        assert others[:count] == tokens[:count], (seed, item)
        totals += Counter(tokens=len(tokens), unclear=count < len(tokens), differing=others != tokens)
    stats = ranked.scheduler.stats()
    return totals + Counter(preempted=stats.num_preemptions, swapped=stats.num_swapped_in, hits=stats.num_prefix_hits)
