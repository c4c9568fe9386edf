"""Orders of service. A policy is a pure function from a request's present state to a key; the smallest is first.

The key is taken when a request begins to wait and whenever its service class changes, not at every step. One order
decides who enters, who gets the rest of the token budget, and whose blocks are found first when they run out.

    fifo        arrival
    priority    service class, arrival
    sjf         service class, output that is still expected, arrival
    deadline    service class, deadline (none: last), arrival
    density     service class, compute per byte of KV (most first), arrival
    fair        the tenant that was served least; its requests by service class, arrival
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tidewheel.request import Request
from tidewheel.scheduler.density import density as compute_density

OrderKey = tuple[float, ...]
Rank = tuple[float, ...]  # an order key, the arrival and its number: total, no two requests compare equal


class Policy(NamedTuple):
    key: Callable[[Request], OrderKey]
    level_parts: int = 1  # of the key: what makes up the level of a request
    by_class: bool = True  # classes count: for victims too, and a waiting CRITICAL makes room for itself
    by_tenant: bool = False  # tenants take turns, and the key orders the requests of one
    by_arrival: bool = False  # inside a class


def fifo(request: Request) -> OrderKey:  # noqa: ARG001
    """First come, first served, whatever the class."""
    return ()


def priority(request: Request) -> OrderKey:
    return (request.service_class,)


def sjf(request: Request) -> OrderKey:
    """Shortest job first, by the predicted output; of a preempted request, by what is left of it."""
    return (request.service_class, max(request.predicted_output_tokens - request.num_output_tokens, 0.0))


def deadline(request: Request) -> OrderKey:
    """Earliest deadline first; the soft one counts where there is no other."""
    due = request.soft_deadline if request.deadline is None else request.deadline
    return (request.service_class, math.inf if due is None else due)


def density(request: Request) -> OrderKey:
    return (request.service_class, -compute_density(request.num_prompt_tokens, request.predicted_output_tokens))


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "fifo": Policy(fifo, level_parts=0, by_class=False, by_arrival=True),
        "priority": Policy(priority, by_arrival=True),
        "sjf": Policy(sjf),
        "deadline": Policy(deadline, level_parts=2),
        "fair": Policy(priority, by_tenant=True, by_arrival=True),
        "density": Policy(density),
    }
)


def rank(policy: Policy, request: Request, sequence: int, *, is_overdue: bool = False) -> Rank:
    """A preempted request keeps arrival and number, so it returns ahead of its class. One that is overdue goes by
    arrival, before those of its class that go by the policy's own order."""
    key = policy.key(request)
    if is_overdue and len(key) > 1:
        key = (key[0], -math.inf)
    return (*key, request.arrival_time, sequence)


def level_of(policy: Policy, rank: Rank) -> Rank:
    """Where it compares as less or equal, a short request may have some of the tokens of a long prompt ahead of it:
    they are of one class, and under `deadline` due at the same time."""
    return rank[: policy.level_parts]
