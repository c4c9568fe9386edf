import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from tidewheel.fleet.router import RoutedRequest, RouteRequest, T
from tidewheel.fleet.routers import PrefixAwareRouter
from tidewheel.fleet.scaling import QUEUE_LIMITS_S
from tidewheel.request import Priority

ROOM = 0.25  # longest wait at a replica with room, as a share of a request's objective
MEMORY = 16  # requests whose waits count


class ReplicaTerms(NamedTuple):
    cost: int = 0
    round_trip_s: float = 0.0  # measured time of a message there and back


class TieredRouter(PrefixAwareRouter[T]):
    """Prefix-aware router among the replicas of the cheapest tier that has room. A tier has one cost.

    A replica has room while the expected wait is at most `ROOM` of the request's objective: its class's limit, the
    time to its deadline, or that to the first token that it asks for, which counts where a replica can meet it. Wait
    and round trip together must meet the objective. A conversation stays in the tier that has its cache while the
    objective is met there, and returns to a cheaper one where nothing waits. Without room anywhere, the tier of the
    shortest delay is chosen; if none is in time, and for LOW requests, the cheapest.
    """

    def __init__(self, terms: Callable[[T], ReplicaTerms], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._terms = terms
        self._clock = clock
        self._waits: dict[int, tuple[float, float]] = {}  # slot → averages of waits (s), and of requests that waited

    def _add(self, replica: T, slot: int) -> None:
        super()._add(replica, slot)
        self._waits[slot] = 0.0, 1.0

    def choose(self, request: RouteRequest, excluded: Collection[T] = ()) -> T | None:
        present = {replica: self._terms(replica).cost for replica in self.slots if replica not in excluded}
        costs = {one: cost for one, cost in present.items() if self._may_take(request, one, cost)}
        if not costs:
            return None
        chosen = min(costs.values()) if request.priority == Priority.LOW else self._tier(request, costs)
        return super().choose(request, [replica for replica in self.slots if costs.get(replica) != chosen])

    def _may_take(self, request: RouteRequest, replica: T, cost: int) -> bool:
        """Return whether the replica may take what a cheaper one has refused: in time, and not LOW."""
        if cost <= request.busy_cost:
            return True
        return request.priority != Priority.LOW and self._delay_s(request, replica) <= self._objective_s(request)

    def _tier(self, request: RouteRequest, costs: Mapping[T, int]) -> int:
        objective_s, home = self._objective_s(request), self._home_cost(request, costs)
        delays = {replica: self._delay_s(request, replica) for replica in costs}
        if min(delays.values()) <= (own_s := request.first_token_due - self._clock()):
            objective_s = min(objective_s, own_s)
        in_time = [replica for replica in costs if delays[replica] <= objective_s]
        if not in_time:
            return min(costs.values())
        with_room = [
            costs[replica]
            for replica in in_time
            if delays[replica] - self._terms(replica).round_trip_s <= objective_s * _share(costs[replica], home)
        ]
        return min(with_room) if with_room else costs[min(in_time, key=delays.__getitem__)]

    def _home_cost(self, request: RouteRequest, costs: Mapping[T, int]) -> int | None:
        """Return the cost of the replica that has the session, or else at least half of the prompt, in its cache."""
        if (home := self._homes.get(request.session)) is not None and home in costs:
            return costs[home]
        depths = {one: len(self.prefixes.known(self.slots[one], request.chunks)) for one in costs}
        deepest = max(costs, key=lambda one: (depths[one], -costs[one]))
        is_home = depths[deepest] and 2 * depths[deepest] * request.chunk_tokens >= request.num_tokens
        return costs[deepest] if is_home else None

    def _objective_s(self, request: RouteRequest) -> float:
        return min(QUEUE_LIMITS_S[request.priority], request.due - self._clock())

    def _delay_s(self, request: RouteRequest, replica: T) -> float:
        """Return the round trip and the expected wait: others' for each request ahead, or the oldest one's so far."""
        slot, round_trip_s = self.slots[replica], self._terms(replica).round_trip_s
        ahead, (waited_s, num_waited) = self._ahead(request.priority, slot), self._waits[slot]
        so_far = max((self._clock() - one.sent for one in ahead if one.request.tells_start), default=0.0)
        return max(len(ahead) * waited_s / num_waited + round_trip_s, so_far)

    def _ahead(self, priority: Priority, slot: int) -> list[RoutedRequest[T]]:
        return [one for one in self._unstarted[slot].values() if one.request.priority <= priority]

    def chosen(self, request: RouteRequest, replica: T) -> RoutedRequest[T]:
        num_ahead, routed = len(self._ahead(request.priority, self.slots[replica])), super().chosen(request, replica)
        routed.sent, routed.num_ahead = self._clock(), num_ahead
        return routed

    def _learn(self, routed: RoutedRequest[T], slot: int, num_cached_tokens: int | None) -> None:
        is_start = routed.has_started and routed.stamp in self._unstarted[slot]
        super()._learn(routed, slot, num_cached_tokens)
        waited_s = routed.waited_s
        if waited_s is None and routed.request.tells_start:
            waited_s = self._clock() - routed.sent - self._terms(routed.replica).round_trip_s
        if is_start and waited_s is not None and routed.request.priority != Priority.LOW:
            mean_s, mean_num = self._waits[slot]
            mean_s += (max(waited_s, 0.0) - mean_s) / MEMORY
            self._waits[slot] = mean_s, mean_num + (routed.num_ahead + 1 - mean_num) / MEMORY


def _share(cost: int, home: int | None) -> float:
    """Return the share of the objective that a conversation may wait at a replica; `home`: cost of its last one."""
    if home is None or cost > home:
        return ROOM
    return 1.0 if cost == home else 0.0
