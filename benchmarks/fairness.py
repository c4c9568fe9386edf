"""Shares of two tenants under `fair` and `priority`, one sending ten times as much.

    python benchmarks/fairness.py FOLDER [--seconds 60] [--save]

Through Triton, the small tenant asks for 60 % of the capacity. Served tokens have the policy's weights: one for a
prompt token, two for an output token.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record
from offered_load import offer, run
from overload import INPUTS, OUTPUTS, PORTS, SETTINGS, measure_capacity
from serving import served
from tidewheel.bench.outcome import Outcome
from tidewheel.workload.arrival_times import poisson_until

SMALL_LOAD = 0.6  # of the capacity
TIMES_AS_MUCH = 10


def served_tokens(outcomes: Sequence[Outcome], tenant: str, seconds: float) -> int:
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
    with served(folder, settings, ports=PORTS) as address:
        capacity = measure_capacity(address, 20.0, rng)
        rate = SMALL_LOAD * capacity * (1 + TIMES_AS_MUCH)
        mix = [(1.0, {"tenant": "small"}), (float(TIMES_AS_MUCH), {"tenant": "big"})]
        load = offer(poisson_until(seconds, rate, rng), mix, INPUTS, OUTPUTS, rng)
        outcomes = run(address.grpc, address.model, load)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a model that tidewheel serves")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/fairness.json")
    arguments = parser.parse_args()
    policies = {}
    for policy in ("fair", "priority"):
        policies[policy] = measure(arguments.folder, policy, arguments.seconds, arguments.seed)
        share, finished = policies[policy]["share_of_small"], policies[policy]["finished"]
        print(f"{policy:9} the small tenant got {share:.1%} of the served tokens; finished {finished}")
    result = {**record.environment("torch", "tritonclient"), "settings": SETTINGS, "policies": policies}
    if arguments.save:
        print(record.save("fairness", result))


if __name__ == "__main__":
    main()
