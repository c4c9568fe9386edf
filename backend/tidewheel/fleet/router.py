"""Protocol of routers, which choose a replica for each request, while replicas come and go.

    join(replica) … leave(replica)
    replica = choose(request)         a decision, which changes nothing
    flight = chosen(request, replica) counts the request
    started(flight, cached tokens)    its first token came
    ended(flight, cached tokens)      it ended, well or not

Names of replicas are values that can be hashed: numbers, or addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from tidewheel.request import Priority

T = TypeVar("T", bound=Hashable)


class RouteRequest(NamedTuple):
    """A request, as far as a decision may depend on it."""

    session: str = ""  # unique for each tenant; empty: none
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    num_tokens: int = 0  # of the prompt, or an estimate
    chunks: tuple[int, ...] = ()  # chained hashes of the prompt's chunks, see `chunk_hashes`
    chunk_tokens: int = 1  # of one chunk


class ReplicaLoad(NamedTuple):
    """All that a replica has to do, as it reports itself."""

    num_requests: int = 0  # not answered
    waiting_tokens: int = 0  # of prompts, to be computed
    running_tokens: int = 0  # with keys and values in its cache, of running requests


@dataclass(slots=True, eq=False)
class Flight(Generic[T]):
    """A request on its way through a replica, as its router counts it."""

    replica: T
    request: RouteRequest
    epoch: int = 0  # of the replica's stay in the fleet
    waiting_tokens: int = 0  # counted until the first token
    has_started: bool = False
    has_ended: bool = False
    stamp: int = 0  # of the prompt's chunks in the knowledge of the replica's cache
    known: tuple[int, ...] = ()  # former stamps of chunks that it seemed to have


class Router(Protocol[T]):
    def join(self, replica: T) -> None:
        """Take in a replica. One that is there already stays as it is."""

    def leave(self, replica: T) -> None:
        """Send it nothing more, and forget it. Its flights may end later."""

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:
        """Return the replica for a request. None: there is none, but for the excluded ones."""

    def chosen(self, request: RouteRequest, replica: T) -> Flight[T]:
        """Count a request that goes to a replica, which must have joined."""

    def started(self, flight: Flight[T], num_cached_tokens: int | None = None) -> None:
        """Note the first token, and how much of the prompt the replica had in its cache. Later calls do nothing."""

    def ended(self, flight: Flight[T], num_cached_tokens: int | None = None) -> None:
        """Count it no more. Tell what was cached here, if that was unknown before. Later calls do nothing."""

    def report(self, replica: T, load: ReplicaLoad) -> None:
        """Correct the load of a replica, which others may send requests too. Unknown replicas are ignored."""
