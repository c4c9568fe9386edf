"""Choice of a replica, from keys of the request and loads of the replicas."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping
from hashlib import blake2b
from operator import itemgetter
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

from tidewheel.errors import ConfigError

T = TypeVar("T", bound=Hashable)

VIRTUAL_NODES = 64  # ring points per replica
LOAD_FACTOR = 1.25  # largest load of a replica, relative to the mean


class RouteKey(NamedTuple):
    """Names; empty: none."""

    session: str = ""
    prefix: str = ""  # of the shared part of the prompt


class Router(Protocol):
    def choose(self, key: RouteKey, loads: list[int]) -> int:
        """Return the replica; `loads` counts unanswered requests of each."""


class RoundRobin:
    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = -1

    def choose(self, key: RouteKey, loads: list[int]) -> int:  # noqa: ARG002
        self._next = (self._next + 1) % self._num_replicas
        return self._next


class LeastLoaded:
    def __init__(self, num_replicas: int) -> None:
        del num_replicas

    def choose(self, key: RouteKey, loads: list[int]) -> int:  # noqa: ARG002
        return loads.index(min(loads))


class HashRing(Generic[T]):
    """Consistent hashing (Karger et al., STOC 1997): adding or removing a replica moves few keys."""

    def __init__(self, replicas: Iterable[T]) -> None:
        """`replicas`: names, or numbers, whose text is hashed."""
        points = [
            (_hash(f"replica {replica} point {point}"), replica)
            for replica in replicas
            for point in range(VIRTUAL_NODES)
        ]
        points.sort(key=itemgetter(0))
        self._hashes = [point for point, _ in points]
        self._replicas = [replica for _, replica in points]

    def owner(self, key: str) -> T:
        return self._replicas[self._position(key)]

    def first(self, key: str, accepts: Callable[[T], bool]) -> T | None:
        """Return the first accepting replica clockwise from the key, or None."""
        if not self._replicas:
            return None
        start, refused = self._position(key), set[T]()
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
    """One replica for a session; the least loaded for other requests."""

    def __init__(self, num_replicas: int) -> None:
        self._ring = HashRing(range(num_replicas))
        self._others = LeastLoaded(num_replicas)

    def choose(self, key: RouteKey, loads: list[int]) -> int:
        return self._ring.owner(key.session) if key.session else self._others.choose(key, loads)


class PrefixAware:
    """One replica for prompts that share a prefix, and the next on the ring once that has `load_bound` requests.

    So a popular prefix spreads only as far as needed.
    """

    def __init__(self, num_replicas: int) -> None:
        self._ring = HashRing(range(num_replicas))
        self._others = LeastLoaded(num_replicas)

    def choose(self, key: RouteKey, loads: list[int]) -> int:
        name = key.session or key.prefix
        if not name:
            return self._others.choose(key, loads)
        bound = load_bound(loads)
        replica = self._ring.first(name, lambda index: loads[index] < bound)
        return self._others.choose(key, loads) if replica is None else replica


def load_bound(loads: list[int]) -> int:
    """Return the most requests of a replica, the new one included.

    Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018.
    """
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
