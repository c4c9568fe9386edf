import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tidewheel.request import Request

OrderKey = tuple[float, ...]
Rank = tuple[float, ...]  # key, arrival, arrival number: a total order


class Policy(NamedTuple):
    key: Callable[[Request], OrderKey]
    level_parts: int = 1  # leading parts of the key
    by_class: bool = True  # classes count; CRITICAL preempts
    by_tenant: bool = False  # fair turns
    by_arrival: bool = False  # within a class; cached prefixes may go first
    by_cache: bool = False  # needs `num_cached_tokens` at arrival


def _due(request: Request) -> OrderKey:
    due = request.soft_deadline if request.deadline is None else request.deadline
    return (request.service_class, min(math.inf if due is None else due, request.latest_start))


def _density(request: Request) -> OrderKey:
    output, cached = request.predicted_output_tokens, request.num_cached_tokens
    return (request.service_class, -compute_density(request.num_prompt_tokens, output, cached))


def compute_density(num_prompt_tokens: int, num_output_tokens: float, num_cached_tokens: int = 0) -> float:
    """Return tokens computed per token of KV held for one step (BlendServe, Zhao et al., 2024, arXiv:2411.16102).

    compute    prompt - cached + output
    memory     prompt · output + output² / 2
    """
    output = max(num_output_tokens, 1.0)
    compute = num_prompt_tokens - num_cached_tokens + output
    return compute / (num_prompt_tokens * output + output * output / 2.0)


POLICIES: Mapping[str, Policy] = {
    "fifo": Policy(lambda _: (), level_parts=0, by_class=False, by_arrival=True),
    "priority": Policy(lambda request: (request.service_class,), by_arrival=True),
    "sjf": Policy(lambda one: (one.service_class, max(one.predicted_output_tokens - one.num_output_tokens, 0.0))),
    "deadline": Policy(_due, level_parts=2),
    "fair": Policy(lambda request: (request.service_class,), by_tenant=True, by_arrival=True),
    "density": Policy(_density, by_cache=True),
}


def rank_of(policy: Policy, request: Request, *, is_overdue: bool = False) -> Rank:
    key = policy.key(request)
    if is_overdue and len(key) > 1:
        key = (key[0], -math.inf)
    return (*key, request.arrival_time, request.sequence)


def level_of(policy: Policy, request: Request) -> Rank:
    return request.rank[: policy.level_parts]


def shared_level(policy: Policy, request: Request) -> Rank:
    """Return the lowest level that may use budget this request leaves; ageing does not raise it."""
    level = level_of(policy, request)
    return (max(level[0], request.priority), *level[1:]) if policy.by_class else level
