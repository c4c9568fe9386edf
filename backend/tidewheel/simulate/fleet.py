import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tidewheel.fleet.router import Router
from tidewheel.fleet.scaling import FleetState, ReplicaReport, ScalingPolicy

DECIDE_EVERY_S = 15.0  # as KEDA in deploy/kubernetes


class SimulatedReplica(Protocol):
    number: int
    num_steps: int
    num_tokens: int
    busy_seconds: float

    def submit(self, now: float, index: int) -> float | None: ...

    def turn(self, now: float) -> float | None:
        """Run the step that is due at `now`. Return the next call's time; None: at the next request."""

    def report(self, now: float) -> ReplicaReport: ...


class ScalingPlan(NamedTuple):
    policy: ScalingPolicy
    startup_s: float
    decide_every_s: float = DECIDE_EVERY_S


@dataclass(slots=True)
class ReplicaLifetime:
    begin: float
    end: float = math.inf


class SimulatedFleet:
    """Simulated replicas under a scaling policy: STARTING, READY, DRAINING or gone.

    A starting replica is ready after `startup_s`; a draining one takes no request and goes with its last.
    """

    def __init__(
        self,
        make_replica: Callable[[int], SimulatedReplica],
        router: Router[int],
        num_replicas: int,
        plan: ScalingPlan | None = None,
    ) -> None:
        self.replicas: list[SimulatedReplica] = []
        self.stays: list[ReplicaLifetime] = []
        self.changes: list[tuple[float, int]] = []
        self._make_replica = make_replica
        self._router = router
        self._plan = plan
        self._starting: deque[tuple[float, int]] = deque()
        self._ready: dict[int, None] = {}
        self._draining: set[int] = set()
        self._unfinished: Counter[int] = Counter()
        self._next_decision = 0.0 if plan is not None else math.inf
        for _ in range(num_replicas):
            self._join(self._add(0.0))

    @property
    def next_event(self) -> float:
        return min(self._next_decision, self._starting[0][0] if self._starting else math.inf)

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def event(self, now: float, num_arrivals: int, num_held: int) -> None:
        while self._starting and self._starting[0][0] <= now:
            self._join(self._starting.popleft()[1])
        if self._plan is not None and self._next_decision <= now:
            self._next_decision = now + self._plan.decide_every_s
            self._scale(self._plan, now, self._state(now, num_arrivals, num_held))

    def sent(self, number: int) -> None:
        self._unfinished[number] += 1

    def ended(self, number: int, now: float) -> None:
        self._unfinished[number] -= 1
        if number in self._draining:
            self._go_if_empty(number, now)

    def replica_seconds(self, until: float) -> float:
        return sum(max(min(stay.end, until) - stay.begin, 0.0) for stay in self.stays)

    def _state(self, now: float, num_arrivals: int, num_held: int) -> FleetState:
        return FleetState(
            now=now,
            ready=tuple(self.replicas[number].report(now) for number in self._ready),
            num_starting=len(self._starting),
            num_arrivals=num_arrivals,
            num_held=num_held,
        )

    def _scale(self, plan: ScalingPlan, now: float, state: FleetState) -> None:
        wanted = plan.policy.decide(state)
        for _ in range(wanted - state.num_replicas):
            self._starting.append((now + plan.startup_s, self._add(now)))
        for _ in range(state.num_replicas - wanted):
            self._remove_one(now)

    def _remove_one(self, now: float) -> None:
        if self._starting:
            self._go(self._starting.pop()[1], now)
            return
        number = min(self._ready, key=lambda ready: (self._unfinished[ready], -ready))
        del self._ready[number]
        self._router.leave(number)
        self._draining.add(number)
        self._go_if_empty(number, now)

    def _add(self, now: float) -> int:
        number = len(self.replicas)
        self.replicas.append(self._make_replica(number))
        self.stays.append(ReplicaLifetime(now))
        self._note(now)
        return number

    def _join(self, number: int) -> None:
        self._ready[number] = None
        self._router.join(number)

    def _go_if_empty(self, number: int, now: float) -> None:
        if not self._unfinished[number]:
            self._draining.discard(number)
            self._go(number, now)

    def _go(self, number: int, now: float) -> None:
        self.stays[number].end = now
        self._note(now)

    def _note(self, now: float) -> None:
        self.changes.append((now, sum(stay.end == math.inf for stay in self.stays)))
