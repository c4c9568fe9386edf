"""The gate before the engine's waiting set: what it counts, and that nothing behind it is lost or sent in a rush."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from support.fake_engine import TIMEOUT_S, RecordingSink
from support.front_ends import Harness, Submitted, error_info
from tidewheel.engine.messages import WHOLE_REQUEST, EngineStats, ErrorInfo
from tidewheel.errors import EngineDead
from tidewheel.frontend.gate import Gate

FULL = ErrorInfo("TW-BUSY", "waiting set is full: 2 of 2 requests", 250, True)
RATE = ErrorInfo("TW-BUSY", "tenant acme is over its rate", 250)


# --- the gate alone -----------------------------------------------------------------------------------------------


def test_it_closes_at_either_bound() -> None:
    gate = Gate(2, 10)
    for key in (1, 2):
        assert gate._is_open
        gate.enter(key)
    assert not gate._is_open
    gate.leave(1)
    gate.weigh(2, 1, 10)
    assert not gate._is_open
    gate.weigh(2, 1, 9)
    assert gate._is_open
    gate.weigh(2, 2, 9)
    assert not gate._is_open


def test_what_has_left_weighs_nothing() -> None:
    gate = Gate(1, 10)
    gate.enter(1)
    assert gate.leave(1) == gate.leave(1) == []
    gate.weigh(1, 1, 99)
    gate.refuse(1)
    assert gate._is_open
    assert gate.offer(0) == []


def test_a_refused_one_takes_the_first_place() -> None:
    gate = Gate(9, 1000)
    for key in (1, 2, 3, 4):
        gate.enter(key)
    gate.refuse(3)
    gate.refuse(2)
    assert not gate._is_open  # though it has sent less than may wait
    assert gate.leave(1) == [3]
    assert gate.leave(4) == [2]
    assert not gate._is_open  # offered, and not yet known to have found a place
    assert gate.leave(2) == []
    assert gate.leave(3) == []
    assert gate._is_open


def test_as_many_are_offered_as_the_engine_has_room_for() -> None:
    gate = Gate(4, 1000)
    for key in range(6):
        gate.enter(key)
        gate.refuse(key)
    assert gate.offer(num_waiting=2) == [0, 1]
    assert gate.offer(num_waiting=4) == [2]  # one to see whether that is still so
    assert gate.offer(num_waiting=0) == [3, 4, 5]


def test_nobody_waits_behind_a_released_gate() -> None:
    gate = Gate(1, 1)
    gate.enter(1)
    waiting = threading.Thread(target=gate.wait)
    waiting.start()
    gate.release()
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()


class GateMachine(RuleBasedStateMachine):
    """Against a list of who is unstarted, refused and late."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(3, 20)
        self.weights: dict[int, tuple[int, int]] = {}
        self.refused: list[int] = []
        self.late: set[int] = set()
        self.num_keys = 0

    @rule(target=keys)
    def enter(self) -> int:
        self.num_keys += 1
        self.gate.enter(self.num_keys)
        self.weights[self.num_keys] = (1, 0)
        return self.num_keys

    @rule(key=keys, num_requests=st.integers(1, 4), num_tokens=st.integers(0, 25))
    def weigh(self, key: int, num_requests: int, num_tokens: int) -> None:
        self.gate.weigh(key, num_requests, num_tokens)
        if key in self.weights:
            self.weights[key] = (num_requests, num_tokens)

    @rule(key=keys)
    def refuse(self, key: int) -> None:
        self.gate.refuse(key)
        if key in self.weights:
            self.late.add(key)
            if key not in self.refused:
                self.refused.append(key)

    @rule(key=keys | consumes(keys))
    def leave(self, key: int) -> None:
        was_here = self.weights.pop(key, None) is not None
        self.late.discard(key)
        self.refused = [other for other in self.refused if other != key]
        expected = self.refused[:1] if was_here else []
        self.refused = self.refused[len(expected) :]
        assert self.gate.leave(key) == expected

    @rule(num_waiting=st.integers(0, 9))
    def offer(self, num_waiting: int) -> None:
        count = max(1, 3 - num_waiting)
        expected, self.refused = self.refused[:count], self.refused[count:]
        assert self.gate.offer(num_waiting) == expected

    @invariant()
    def is_open_while_there_is_room(self) -> None:
        num_requests = sum(weight[0] for weight in self.weights.values())
        num_tokens = sum(weight[1] for weight in self.weights.values())
        assert self.gate._is_open == (num_requests < 3 and num_tokens < 20 and not self.late)


TestGate = GateMachine.TestCase


# --- a front end behind it ----------------------------------------------------------------------------------------


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path, gate=Gate(2, 100))
    yield harness
    harness.frontend.close()


def refuse(harness: Harness, submitted: Submitted, error: ErrorInfo = FULL) -> None:
    harness.deliver(submitted.key, [], "error", error=error, index=WHOLE_REQUEST)


def wait_sent(harness: Harness, count: int) -> None:
    harness.engine.wait(lambda: harness.engine.num_added >= count)


class Waiter:
    """A thread in `wait_for_room`, as Triton's in `execute`."""

    def __init__(self, harness: Harness) -> None:
        self._frontend = harness.frontend
        self._thread = threading.Thread(target=harness.frontend.wait_for_room)
        self._thread.start()

    @property
    def is_held(self) -> bool:
        gate = self._frontend._gate
        return gate is not None and not gate._is_open and self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


def test_a_first_token_makes_room(harness: Harness) -> None:
    first = harness.submit(stream=True)
    harness.frontend.wait_for_room()
    harness.submit(stream=True)
    waiter = Waiter(harness)
    assert waiter.is_held
    harness.deliver(first.key, [5])
    waiter.join()


@pytest.mark.parametrize("how", ["error", "cancel", "lost"])
def test_an_end_without_a_token_makes_room(harness: Harness, how: str) -> None:
    first = harness.submit(stream=True)
    harness.submit(stream=True)
    waiter = Waiter(harness)
    if how == "error":
        harness.deliver(first.key, [], "error", error=error_info())
    elif how == "cancel":
        first.sink.gone.set()
    else:
        harness.frontend.on_lost([first.key], EngineDead("gone"))
    waiter.join()
    first.sink.wait_end()


def test_the_sequences_of_a_request_count(harness: Harness) -> None:
    key, _ = harness.submit(stream=True, parameters={"n": 2})
    waiter = Waiter(harness)
    assert waiter.is_held
    harness.deliver(key, [5], index=1)
    waiter.join()


def test_prompt_tokens_count(harness: Harness) -> None:
    submitted = harness.submit("x" * 100, stream=True)
    waiter = Waiter(harness)
    assert waiter.is_held
    harness.finish(submitted, "y")
    waiter.join()


def test_a_request_that_is_wrong_holds_nobody_up(harness: Harness) -> None:
    for _ in range(5):
        harness.refuse(text="")
        harness.frontend.wait_for_room()


def test_what_the_engine_has_no_room_for_is_sent_again(harness: Harness) -> None:
    """Another front end's requests fill the waiting set."""
    first, second = harness.submit(stream=True), harness.submit(stream=True)
    refuse(harness, second)
    harness.deliver(first.key, [5])
    wait_sent(harness, 3)
    assert harness.finish(second, "the fox").text == "the fox"
    assert second.sink.num_ends == 1


def test_it_is_sent_again_when_the_engine_says_how_it_is(harness: Harness) -> None:
    submitted = harness.submit(stream=True)
    for count in (2, 3, 4):
        refuse(harness, submitted)
        harness.frontend.on_stats(EngineStats(num_waiting=2))
        wait_sent(harness, count)
    harness.frontend.on_stats(EngineStats())
    assert harness.engine.num_added == 4  # it is there
    assert harness.finish(submitted, "x").finish_reason == "length"


def test_other_refusals_end_the_request(harness: Harness) -> None:
    submitted = harness.submit(stream=True)
    refuse(harness, submitted, RATE)
    submitted.sink.wait_end()
    assert str(submitted.sink.error) == "[TW-BUSY retry_after_ms=250] tenant acme is over its rate"


def test_without_a_gate_a_full_waiting_set_ends_it(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    submitted = harness.submit(stream=True)
    refuse(harness, submitted)
    submitted.sink.wait_end()
    assert str(submitted.sink.error) == "[TW-BUSY retry_after_ms=250] waiting set is full: 2 of 2 requests"
    harness.frontend.wait_for_room()
    harness.frontend.close()


def test_a_held_request_can_be_cancelled(harness: Harness) -> None:
    submitted = harness.submit(stream=True)
    refuse(harness, submitted)
    waiter = Waiter(harness)
    assert waiter.is_held
    submitted.sink.gone.set()
    submitted.sink.wait_end()
    assert submitted.sink.finish_reason == "cancelled"
    waiter.join()
    harness.frontend.on_stats(EngineStats())
    assert harness.engine.num_added == 1


def test_a_held_request_ends_at_its_deadline(harness: Harness) -> None:
    """The test's arrivals are in the distant past, so the deadline has passed; the engine has a while to say so."""
    submitted = harness.submit(stream=True, parameters={"deadline_ms": 1})
    refuse(harness, submitted)
    submitted.sink.wait_end()
    assert str(submitted.sink.error).startswith("[TW-DEADLINE]")
    assert harness.frontend.stats().rejected == {"TW-DEADLINE": 1}


def test_an_engine_that_is_gone_ends_what_is_sent_again(harness: Harness) -> None:
    submitted = harness.submit(stream=True)
    refuse(harness, submitted)
    waiter = Waiter(harness)
    harness.engine.refusal = EngineDead("gone for good")
    harness.frontend.on_stats(EngineStats())
    submitted.sink.wait_end()
    assert str(submitted.sink.error) == "[TW-ENGINE-DEAD] gone for good"
    waiter.join()


def test_closing_releases_the_gate(harness: Harness) -> None:
    sinks: list[RecordingSink] = [harness.submit(stream=True).sink for _ in range(2)]
    waiter = Waiter(harness)
    harness.frontend.close()
    waiter.join()
    assert [str(sink.error) for sink in sinks] == ["[TW-DRAINING] the server is shutting down"] * 2
