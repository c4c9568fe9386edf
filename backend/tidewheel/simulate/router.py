"""Which replica a request goes to. A router sees what a real one sees: keys of requests, and how many of them each
replica has not answered yet."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple, Protocol

from tidewheel.errors import ConfigError

VIRTUAL_NODES = 64  # points of each replica on the ring
LOAD_FACTOR = 1.25  # of the mean load: what a replica may have before its keys go elsewhere


class RouteKey(NamedTuple):
    """What of a request a router may look at. Empty: there is none."""

    session: str = ""
    prefix: str = ""  # the part of the prompt that it shares with others


class Router(Protocol):
    def choose(self, key: RouteKey, loads: list[int]) -> int:
        """The replica; `loads` are the unanswered requests of each."""


class RoundRobin:
    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = -1

    def choose(self, key: RouteKey, loads: list[int]) -> int:  # noqa: ARG002
        self._next = (self._next + 1) % self._num_replicas
        return self._next


class LeastLoaded:
    """The replica with the fewest unanswered requests; of several, the first."""

    def __init__(self, num_replicas: int) -> None:
        del num_replicas

    def choose(self, key: RouteKey, loads: list[int]) -> int:  # noqa: ARG002
        return loads.index(min(loads))


class HashRing:
    """Consistent hashing (Karger et al., STOC 1997): a replica that comes or goes moves few keys."""

    def __init__(self, num_replicas: int) -> None:
        points = sorted(
            (_hash(f"replica {replica} point {point}"), replica)
            for replica in range(num_replicas)
            for point in range(VIRTUAL_NODES)
        )
        self._hashes = [point for point, _ in points]
        self._replicas = [replica for _, replica in points]

    def owner(self, key: str) -> int:
        return self._replicas[self._position(key)]

    def first(self, key: str, accepts: Callable[[int], bool]) -> int | None:
        """The first replica clockwise from the key that accepts; None if none does."""
        start, refused = self._position(key), set[int]()
        for offset in range(len(self._replicas)):
            replica = self._replicas[(start + offset) % len(self._replicas)]
            if replica in refused:
                continue
            if accepts(replica):
                return replica
            refused.add(replica)
        return None

    def _position(self, key: str) -> int:
        return bisect_left(self._hashes, _hash(key)) % len(self._hashes)


class SessionAffinity:
    """All turns of a session go to one replica, whatever its load; others to the least loaded."""

    def __init__(self, num_replicas: int) -> None:
        self._ring = HashRing(num_replicas)
        self._others = LeastLoaded(num_replicas)

    def choose(self, key: RouteKey, loads: list[int]) -> int:
        return self._ring.owner(key.session) if key.session else self._others.choose(key, loads)


class PrefixAware:
    """Prompts that share a prefix go to one replica while its load is bounded; the overflow goes to the next one on
    the ring, so that a popular prefix spreads over as many replicas as it needs and no more.

    "Consistent Hashing with Bounded Loads", Mirrokni, Thorup, Zadimoghaddam, SODA 2018: with n replicas and m
    requests in them, the new one included, none gets more than ceil(c · m / n), here with c = 1.25.
    """

    def __init__(self, num_replicas: int) -> None:
        self._ring = HashRing(num_replicas)
        self._others = LeastLoaded(num_replicas)

    def choose(self, key: RouteKey, loads: list[int]) -> int:
        name = key.session or key.prefix
        if not name:
            return self._others.choose(key, loads)
        bound = load_bound(loads)
        replica = self._ring.first(name, lambda index: loads[index] < bound)
        return self._others.choose(key, loads) if replica is None else replica


def load_bound(loads: list[int]) -> int:
    """Requests that one replica may have when the new one is in."""
    return math.ceil(LOAD_FACTOR * (sum(loads) + 1) / len(loads))


ROUTERS: Mapping[str, Callable[[int], Router]] = MappingProxyType(
    {
        "round-robin": RoundRobin,
        "least-loaded": LeastLoaded,
        "session-affinity": SessionAffinity,
        "prefix-aware": PrefixAware,
    }
)


def make_router(name: str, num_replicas: int) -> Router:
    if name not in ROUTERS:
        raise ConfigError(f"router is {name!r}: choose one of {', '.join(ROUTERS)}")
    return ROUTERS[name](num_replicas)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
