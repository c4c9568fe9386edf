"""Shares of two tenants under `fair` and `priority`, one sending ten times as much, through Triton.

    python benchmarks tenant_fairness FOLDER --save

The small tenant asks for 60 % of the capacity. An output token weighs twice a prompt token, as in the policy.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.serving import served
from common.study import Study
from path.overload import SETTINGS, measure_capacity, send
from tidewheel.bench.outcome import RequestOutcome
from tidewheel.bench.workloads import WorkloadKind

SMALL_LOAD = 0.6  # of the capacity
TIMES_AS_MUCH = 10


def served_tokens(outcomes: Sequence[RequestOutcome], tenant: str, seconds: float) -> int:
    """Return weighted tokens of requests that ended while both tenants sent, after the start."""
    return sum(
        len(o.offered.input_ids) + 2 * o.num_tokens
        for o in outcomes
        if o.offered.parameters["tenant"] == tenant
        and o.last_token is not None
        and 0.2 * seconds <= o.sent + o.last_token < seconds
    )


def measure(folder: Path, policy: str, seconds: float, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    settings = {**SETTINGS, "scheduling_policy": policy, "max_waiting_requests": 16}
    with served(folder, settings) as address:
        capacity = measure_capacity(address, 20.0, rng)
        rate = SMALL_LOAD * capacity * (1 + TIMES_AS_MUCH)
        tenants = [WorkloadKind(1.0, {"tenant": "small"}), WorkloadKind(TIMES_AS_MUCH, {"tenant": "big"})]
        outcomes = send(address, rate, seconds, rng, tenants)
    tokens = {tenant: served_tokens(outcomes, tenant, seconds) for tenant in ("small", "big")}
    offered = Counter(o.offered.parameters["tenant"] for o in outcomes)
    finished = Counter(o.offered.parameters["tenant"] for o in outcomes if o.finish_reason == "length")
    return {
        "capacity_requests_per_s": capacity,
        "served_weighted_tokens": tokens,
        "share_of_small": tokens["small"] / max(1, sum(tokens.values())),
        "offered": dict(offered),
        "finished": dict(finished),
    }


def main() -> None:
    study = Study("fairness", __doc__, "torch", "tritonclient")
    study.add_argument("folder", type=Path, help="a model that tidewheel serves")
    study.add_argument("--seconds", type=float, default=60.0)
    study.add_argument("--seed", type=int, default=0)
    options = study.begin()
    policies = {}
    for policy in ("fair", "priority"):
        policies[policy] = measure(options.folder, policy, options.seconds, options.seed)
        share, finished = policies[policy]["share_of_small"], policies[policy]["finished"]
        print(f"{policy:9} the small tenant got {share:.1%} of the served tokens; finished {finished}")
    study.save({"settings": SETTINGS, "policies": policies})


if __name__ == "__main__":
    main()
