"""The requests that wait for a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from tidewheel.kvcache.invariants import require
from tidewheel.request import Priority, Request, RequestState
from tidewheel.scheduler.policy import Rank


class WaitingSet:
    """Waiting and preempted requests by rank.

    A sorted list: the head is read every step, an insert or a removal is a binary search and one `memmove` of
    pointers, which for the thousands of entries that admission allows is cheaper than a heap's lazy deletion.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, Request]] = []
        self._ranks: dict[str, Rank] = {}
        self._by_class = dict.fromkeys(Priority, 0)
        self.num_tokens = 0  # prompt, and output of preempted requests
        self.num_new = 0  # never started: what admission bounds
        self.num_new_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries)

    @property
    def by_class(self) -> tuple[int, int, int, int]:
        critical, high, normal, low = self._by_class.values()
        return critical, high, normal, low

    def push(self, rank: Rank, request: Request) -> None:
        insort(self._entries, (rank, request))  # ranks are unique: requests are never compared
        self._ranks[request.request_id] = rank
        self._count(request, 1)

    def head(self) -> Request:
        return self._entries[0][1]

    def head_rank(self) -> Rank:
        return self._entries[0][0]

    def remove(self, request: Request) -> Rank:
        """Takes the request out, wherever it stands; its rank."""
        rank = self._ranks.pop(request.request_id)
        del self._entries[bisect_left(self._entries, (rank,))]
        self._count(request, -1)
        return rank

    def check_invariants(self) -> None:
        require(all(a < b for (a, _), (b, _) in zip(self._entries, self._entries[1:], strict=False)), "order")
        require(len(self._entries) == len(self._ranks), "entries and ranks of the waiting set disagree")
        for rank, request in self._entries:
            require(self._ranks[request.request_id] == rank, f"{request} waits under another rank")
        new = [request for request in self if request.state is RequestState.WAITING]
        require(self.num_tokens == sum(request.num_tokens for request in self), "waiting tokens are miscounted")
        require(self.num_new == len(new), "new requests are miscounted")
        require(self.num_new_tokens == sum(request.num_tokens for request in new), "new tokens are miscounted")
        require(sum(self.by_class) == len(self._entries), "classes are miscounted")

    def _count(self, request: Request, sign: int) -> None:
        num_tokens = sign * request.num_tokens
        self._by_class[request.priority] += sign
        self.num_tokens += num_tokens
        if request.state is RequestState.WAITING:
            self.num_new += sign
            self.num_new_tokens += num_tokens
