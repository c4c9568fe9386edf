"""The router that knows sessions and caches, driven at random, beside plain counts of what it was told."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidewheel.fleet.router import RoutedRequest, RouteRequest, load_bound
from tidewheel.fleet.routers import PrefixAwareRouter, PrefixIndex
from tidewheel.request import Priority

MAX_KNOWN, MAX_SESSIONS, CHUNK = 24, 5, 10
NAMES = [f"server {number}" for number in range(12)]


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = PrefixAwareRouter[str](MAX_KNOWN, MAX_SESSIONS)
        self.present: set[str] = set()
        self.open: list[tuple[RoutedRequest[str], int]] = []  # with the replica's stay
        self.stays: Counter[str] = Counter()
        self.most_open = 0.0

    def counts(self) -> Counter[str]:
        return Counter(
            dict.fromkeys(self.present, 0)
            | Counter(routed.replica for routed, stay in self.open if self.is_there(routed, stay))
        )

    def is_there(self, routed: RoutedRequest[str], stay: int) -> bool:
        return routed.replica in self.present and self.stays[routed.replica] == stay

    def ahead(self, name: str, priority: Priority) -> int:
        return sum(
            routed.waiting_tokens
            for routed, stay in self.open
            if routed.replica == name
            and self.is_there(routed, stay)
            and not routed.has_started
            and routed.request.priority <= priority
        )

    def uncached(self, name: str, request: RouteRequest) -> int:
        slot = self.router.slots[name]
        return max(request.num_tokens - len(self.router.prefixes.known(slot, request.chunks)) * CHUNK, 1)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        if name not in self.present:
            self.stays[name] += 1
        self.router.join(name)
        self.present.add(name)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.router.leave(name)
        self.present.discard(name)

    @rule(
        session=st.sampled_from(["", "", "a", "b", "c", "d", "e", "f", "g"]),
        priority=st.sampled_from(Priority),
        family=st.integers(0, 3),
        length=st.integers(0, 5),
        excluded=st.sets(st.sampled_from(NAMES), max_size=3),
    )
    def send(self, session: str, priority: Priority, family: int, length: int, excluded: set[str]) -> None:
        chunks = tuple(100 * family + depth for depth in range(length))
        request = RouteRequest(session, priority, CHUNK * length + 5, chunks, CHUNK)
        chosen = self.router.choose(request, excluded)
        assert chosen == self.router.choose(request, excluded), "a decision changes nothing"
        allowed = self.present - excluded
        if chosen is None:
            assert not allowed
            return
        assert chosen in allowed
        counts = self.counts()
        if priority == Priority.CRITICAL:
            before = {name: self.ahead(name, priority) + self.uncached(name, request) for name in allowed}
            assert before[chosen] == min(before.values())
        else:
            total = float(sum(counts[name] for name in allowed))
            if session:
                total = max(total, self.router.usual_open * len(allowed) / len(self.present))
            assert counts[chosen] + 1 <= load_bound(total, len(allowed))
        self.open.append((self.router.chosen(request, chosen), self.stays[chosen]))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), cached=st.none() | st.integers(0, 60))
    def start(self, data: st.DataObject, cached: int | None) -> None:
        self.router.started(data.draw(st.sampled_from(self.open))[0], cached)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), cached=st.none() | st.integers(0, 60))
    def end(self, data: st.DataObject, cached: int | None) -> None:
        chosen = data.draw(st.sampled_from(self.open))
        self.open.remove(chosen)
        self.router.ended(chosen[0], cached)

    @invariant()
    def loads_are_those_of_open_requests(self) -> None:
        loads, counts = self.router, self.counts()
        assert set(loads.slots) == self.present
        assert loads.total_open == sum(counts.values())
        self.most_open = max(self.most_open, loads.total_open)
        assert 0 <= loads.usual_open <= self.most_open
        for name in self.present:
            assert loads.num_open[loads.slots[name]] == counts[name]
            for priority in Priority:
                assert loads.waiting[priority - 1, loads.slots[name]] == self.ahead(name, priority)
        for priority in Priority:
            assert loads.total_waiting[priority - 1] == sum(self.ahead(name, priority) for name in self.present)
        running = sum(f.request.num_tokens for f, stay in self.open if f.has_started and self.is_there(f, stay))
        assert loads.running.sum() == running

    @invariant()
    def what_is_remembered_is_bounded(self) -> None:
        check_index(self.router.prefixes)
        assert len(self.router._homes) <= MAX_SESSIONS
        assert all(len(stamps) <= len(self.open) for stamps in self.router._unstarted.values())
        assert np.isinf(self.router.num_open).sum() == len(self.router.names) - len(self.present)


def check_index(index: PrefixIndex) -> None:
    pairs = {(chunk, slot) for slot, stamps in index._stamps.items() for chunk in stamps}
    held = {(chunk, slot) for chunk, bits in index._holders.items() for slot in index._stamps if bits >> slot & 1}
    assert pairs == held
    assert sum(bits.bit_count() for bits in index._holders.values()) == len(pairs)
    assert len(pairs) <= index._max_known
    for stamps in index._stamps.values():
        assert list(stamps.values()) == sorted(stamps.values())


RouterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRouterMachine = RouterMachine.TestCase
