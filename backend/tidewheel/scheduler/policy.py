"""Orders of service. A policy is a pure function from a request's present state to a key; the smallest is first.

The key is taken when a request begins to wait and when its service class changes, not at every step. One order
decides which request enters next, which gets the rest of the token budget, and which keeps its blocks.

    fifo        arrival
    priority    service class, arrival
    sjf         service class, predicted output that is left, arrival
    deadline    service class, deadline (the soft one where there is no other; none: last), arrival
    density     service class, compute per byte of KV (most first), arrival
    fair        least served tenant; its requests by service class, arrival
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tidewheel.request import Request

OrderKey = tuple[float, ...]
Rank = tuple[float, ...]  # an order key, the arrival and its number: total, no two requests compare equal


class Policy(NamedTuple):
    key: Callable[[Request], OrderKey]
    level_parts: int = 1  # leading parts of the key that make up the level of a request
    by_class: bool = True  # classes count: for victims too, and a waiting CRITICAL makes room for itself
    by_tenant: bool = False  # tenants take turns, and the key orders the requests of one
    by_arrival: bool = False  # inside a class: a cached prefix may go ahead there
    by_cache: bool = False  # the key reads `num_cached_tokens`: it is looked up when a request arrives


def _class(request: Request) -> OrderKey:
    return (request.service_class,)


def _output_left(request: Request) -> OrderKey:
    return (request.service_class, max(request.predicted_output_tokens - request.num_output_tokens, 0.0))


def _due(request: Request) -> OrderKey:
    due = request.soft_deadline if request.deadline is None else request.deadline
    return (request.service_class, math.inf if due is None else due)


def _density(request: Request) -> OrderKey:
    output, cached = request.predicted_output_tokens, request.num_cached_tokens
    return (request.service_class, -compute_density(request.num_prompt_tokens, output, cached))


def compute_density(num_prompt_tokens: int, num_output_tokens: float, num_cached_tokens: int = 0) -> float:
    """Return the tokens computed per token of KV held for one step.

        compute    prompt - cached + output
        memory     prompt · output + output² / 2        tokens held, summed over the steps of decoding

    BlendServe (Zhao et al., 2024, arXiv:2411.16102) tells requests apart by compute over memory; this formula counts
    the steps of Tidewheel. FLOPs per token and bytes per token of KV are the same for all requests of one model, so
    the order needs neither. `num_output_tokens` is the predicted length; less than 1 counts as 1.
    """
    output = max(num_output_tokens, 1.0)
    compute = num_prompt_tokens - num_cached_tokens + output
    return compute / (num_prompt_tokens * output + output * output / 2.0)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "fifo": Policy(lambda _: (), level_parts=0, by_class=False, by_arrival=True),
        "priority": Policy(_class, by_arrival=True),
        "sjf": Policy(_output_left),
        "deadline": Policy(_due, level_parts=2),
        "fair": Policy(_class, by_tenant=True, by_arrival=True),
        "density": Policy(_density, by_cache=True),
    }
)


def rank_of(policy: Policy, request: Request, *, is_overdue: bool = False) -> Rank:
    """Return the request's place. A preempted request keeps its arrival, so it returns ahead of its class.

    Overdue requests go by arrival, before the others of their class.
    """
    key = policy.key(request)
    if is_overdue and len(key) > 1:
        key = (key[0], -math.inf)
    return (*key, request.arrival_time, request.sequence)


def level_of(policy: Policy, request: Request) -> Rank:
    """Return the part of the rank that decides whether a short request shares the tokens of a long one ahead."""
    return request.rank[: policy.level_parts]


def shared_level(policy: Policy, request: Request) -> Rank:
    """Return the highest level that shares the tokens of this long request: an aged one leaves its class a share."""
    level = level_of(policy, request)
    return (max(level[0], request.priority), *level[1:]) if policy.by_class else level
