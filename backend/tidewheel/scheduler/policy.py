"""Orders of service. A policy is a pure function from a request to a key; the smallest key is served first.

The same order decides who waits, who gets the rest of the token budget and who has to leave when blocks run out, so
the best request in the running set is never a victim and always progresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tidewheel.request import Request

OrderKey = tuple[float, ...]
Policy = Callable[[Request], OrderKey]

Rank = tuple[float, ...]  # an order key and the number of the arrival: total, no two requests compare equal


def fifo(request: Request) -> OrderKey:
    """First come, first served; the youngest is the victim."""
    return (request.arrival_time,)


def priority(request: Request) -> OrderKey:
    """By class, then by arrival; the victim is the youngest of the lowest class."""
    return (int(request.priority), request.arrival_time)


POLICIES: Mapping[str, Policy] = MappingProxyType({"fifo": fifo, "priority": priority})


def rank(policy: Policy, request: Request, sequence: int) -> Rank:
    """Place in every order: a request that is preempted keeps it, so it returns ahead of its class."""
    return (*policy(request), sequence)


def choose_victim(ranks: Mapping[int, Rank]) -> int:
    """The row, of the running rows given with their ranks, that is served last."""
    return max(ranks, key=ranks.__getitem__)
