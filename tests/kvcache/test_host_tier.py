"""HostTier: plain examples, and a state machine against plain lists."""

from __future__ import annotations

from itertools import takewhile

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidewheel.errors import InternalError
from tidewheel.kvcache.host_tier import HostTier

KEYS = [bytes([value]) * 32 for value in range(10)]


def put(tier: HostTier, key: bytes) -> int:
    slot = tier.insert(key)
    assert slot is not None
    tier.unpin([slot])
    return slot


def test_the_content_used_longest_ago_is_evicted() -> None:
    tier = HostTier(2)
    first, second = put(tier, KEYS[0]), put(tier, KEYS[1])
    tier.pin([first])  # used again
    tier.unpin([first])
    assert put(tier, KEYS[2]) == second
    assert (tier.lookup(KEYS[0]), tier.lookup(KEYS[1])) == (first, None)


def test_a_pinned_slot_is_not_given_away() -> None:
    tier = HostTier(1)
    slot = tier.insert(KEYS[0])
    assert tier.insert(KEYS[1]) is None
    assert tier.lookup(KEYS[0]) == slot
    assert tier.num_free_slots == 0


def test_a_content_dropped_while_it_is_copied_leaves_when_the_copy_is_done() -> None:
    tier = HostTier(1)
    slot = tier.insert(KEYS[0])
    assert slot is not None
    tier.drop(KEYS[0])
    assert tier.lookup(KEYS[0]) is None
    assert tier.insert(KEYS[1]) is None
    tier.unpin([slot])
    assert tier.num_free_slots == 1
    assert tier.insert(KEYS[1]) == slot


def test_without_slots_nothing_fits() -> None:
    tier = HostTier(0)
    assert tier.insert(KEYS[0]) is None
    tier.drop(KEYS[0])
    tier.check_invariants()


@pytest.mark.parametrize("misuse", ["second slot", "unpin", "pin of an empty slot", "negative size"])
def test_misuse_is_told(misuse: str) -> None:
    tier = HostTier(2)
    slot = put(tier, KEYS[0])
    calls = {
        "second slot": lambda: tier.insert(KEYS[0]),
        "unpin": lambda: tier.unpin([slot]),
        "pin of an empty slot": lambda: tier.pin([1 - slot]),
        "negative size": lambda: HostTier(-1),
    }
    with pytest.raises(InternalError, match="slot"):
        calls[misuse]()
    tier.check_invariants()


def test_check_invariants_sees_damage() -> None:
    tier = HostTier(2)
    put(tier, KEYS[0])
    tier._slots[KEYS[1]] = 1
    with pytest.raises(InternalError, match="disagree"):
        tier.check_invariants()


class HostTierMachine(RuleBasedStateMachine):
    """The model: contents by slot, pins by slot, and slots in the order of their last use."""

    @initialize(num_slots=st.integers(0, 5))
    def start(self, num_slots: int) -> None:
        self.tier = HostTier(num_slots)
        self.contents: dict[int, bytes] = {}
        self.pins = dict.fromkeys(range(num_slots), 0)
        self.order: list[int] = []

    def find(self, key: bytes) -> int | None:
        return next((slot for slot, content in self.contents.items() if content == key), None)

    @rule(key=st.sampled_from(KEYS))
    def insert(self, key: bytes) -> None:
        if self.find(key) is not None:
            return
        empty = {slot for slot, count in self.pins.items() if not count and slot not in self.contents}
        idle = [slot for slot in self.order if not self.pins[slot] and slot in self.contents]
        slot = self.tier.insert(key)
        if slot is None:
            assert not empty and not idle
            return
        assert slot in empty if empty else slot == idle[0]
        self.contents[slot] = key
        self.pins[slot] = 1

    @rule(key=st.sampled_from(KEYS))
    def pin_what_is_found(self, key: bytes) -> None:
        slot = self.tier.lookup(key)
        assert slot == self.find(key)
        if slot is not None:
            self.tier.pin([slot])
            self.pins[slot] += 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [slot for slot, count in self.pins.items() if count]
        slots = data.draw(st.lists(st.sampled_from(pinned), unique=True, min_size=1))
        self.tier.unpin(slots)
        for slot in slots:
            self.pins[slot] -= 1
            if not self.pins[slot]:
                self.order = [*(other for other in self.order if other != slot), slot]

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: bytes) -> None:
        self.tier.drop(key)
        slot = self.find(key)
        if slot is not None:
            del self.contents[slot]

    @invariant()
    def same_state(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.check_invariants()
        assert len(self.tier._slots) == len(self.contents)
        for start in range(len(KEYS)):
            found = takewhile(lambda key: self.find(key) is not None, KEYS[start:])
            assert self.tier.lookup_prefix(KEYS[start:]) == tuple(found)
        assert self.tier.num_free_slots == sum(count == 0 for count in self.pins.values())
        for slot in self.pins:
            assert self.tier.key_of(slot) == self.contents.get(slot)


TestHostTierMachine = HostTierMachine.TestCase
TestHostTierMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.slow
class TestHostTierMachineLong(HostTierMachine.TestCase):
    settings = settings(max_examples=10_000, stateful_step_count=80, deadline=None)
