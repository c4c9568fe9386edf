"""Protocol of routers, which choose a replica for each request.

    join(replica) … leave(replica)
    replica = choose(request)          changes nothing
    routed = chosen(request, replica)  counts the request
    started(routed, cached tokens)     at its first token
    ended(routed, cached tokens)       at its end or failure

A replica's name is any hashable value.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, NamedTuple, Protocol, TypeVar

from tidewheel.request import Priority

T = TypeVar("T", bound=Hashable)
MAX_CHUNKS = 512  # of one prompt


class RouteRequest(NamedTuple):
    session: str = ""  # unique within a tenant; empty: none
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    num_tokens: int = 0  # or an estimate
    chunks: tuple[int, ...] = ()  # result of `chunk_hashes`
    chunk_tokens: int = 1


class ReplicaLoad(NamedTuple):
    """Load from all clients of a replica."""

    num_requests: int = 0  # unanswered
    waiting_tokens: int = 0  # of uncomputed prompts
    running_tokens: int = 0  # in the KV cache


@dataclass(slots=True, eq=False)
class RoutedRequest(Generic[T]):
    replica: T
    request: RouteRequest
    epoch: int = 0  # the replica's stay in the fleet
    waiting_tokens: int = 0  # counted until the first token
    has_started: bool = False
    has_ended: bool = False
    stamp: int = 0  # in the `PrefixIndex`
    known: tuple[int, ...] = ()  # earlier stamps of cached chunks


class Router(Protocol[T]):
    def join(self, replica: T) -> None:
        """Add a replica, if absent."""

    def leave(self, replica: T) -> None:
        """Remove a replica, whose requests may end later."""

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:
        """Return None if all replicas are excluded."""

    def chosen(self, request: RouteRequest, replica: T) -> RoutedRequest[T]:
        """Count a request at a joined replica."""

    def started(self, routed: RoutedRequest[T], num_cached_tokens: int | None = None) -> None:
        """Record the first token and cached prompt tokens. Later calls do nothing."""

    def ended(self, routed: RoutedRequest[T], num_cached_tokens: int | None = None) -> None:
        """Stop counting; `num_cached_tokens` if `started` lacked it. Later calls do nothing."""

    def report(self, replica: T, load: ReplicaLoad) -> None:
        """Set other clients' load; ignore unknown replicas."""


def chunk_hashes(data: bytes | memoryview, chunk_bytes: int, tenant: str = "", salt: str = "") -> tuple[int, ...]:
    """Return chained hashes of full chunks: equal first n hashes mean equal first n chunks.

    Prompts of different tenants or salts share no hash, as they share no cache.
    """
    view = memoryview(data)
    name = tenant.encode("utf-8", "surrogatepass")
    parent = blake2b(
        b"%d " % len(name) + name + salt.encode("utf-8", "surrogatepass"), digest_size=8, person=b"tw chunk"
    ).digest()
    hashes = []
    for start in range(0, min(len(view) // chunk_bytes, MAX_CHUNKS) * chunk_bytes, chunk_bytes):
        digest = blake2b(parent, digest_size=8)
        digest.update(view[start : start + chunk_bytes])
        parent = digest.digest()
        hashes.append(int.from_bytes(parent, "little"))
    return tuple(hashes)
