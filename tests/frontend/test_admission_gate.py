"""The doors before the engine's waiting set: what they count, and that nothing behind them is lost."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from support.engine.fake_engine import TIMEOUT_S, RecordingSink
from support.frontend.front_ends import FrontendHarness, Submitted, error_info
from tidewheel.engine.messages import WHOLE_REQUEST, AddRequest, ErrorInfo, Room
from tidewheel.errors import EngineDead, KvCacheFull, WaitingSetFull
from tidewheel.frontend.admission_gate import AdmissionGate, _Claim
from tidewheel.request import Priority
from tidewheel.request_options import RequestOptions
from tidewheel.sampling import SamplingParams
from tidewheel.stats import BlockShortage

FULL = ErrorInfo("TW-BUSY", "waiting set is full: 2 of 2 requests", 250, True)
RATE = ErrorInfo("TW-BUSY", "tenant acme is over its rate", 250)


def request(key: int, *, priority: int = 3, n: int = 1, num_tokens: int = 4) -> AddRequest:
    options = RequestOptions(priority=Priority(priority), n=n)
    return AddRequest(key, bytes(4 * num_tokens), SamplingParams(max_tokens=1), options=options)


def room(
    waiting: int,
    *,
    tokens: int = 0,
    lowest: int = Priority.LOW,
    received: list[int] | None = None,
    most: int = 4,
    shortage: BlockShortage | None = None,
) -> Room:
    return Room(waiting, most, tokens, 100, lowest, 250, shortage, received or [])


# --- refusing at once ---------------------------------------------------------------------------------------------


def test_until_the_engine_has_spoken_nothing_is_refused() -> None:
    gate = AdmissionGate()
    for key in range(100):
        gate.claim(request(key))


def test_what_was_sent_since_counts_until_the_engine_has_heard_of_it() -> None:
    gate = AdmissionGate()
    gate.set_room(room(2, lowest=Priority.CRITICAL))
    gate.claim(request(1))
    gate.claim(request(2))
    with pytest.raises(WaitingSetFull, match="4 of 4 requests") as caught:
        gate.claim(request(3))
    assert caught.value.retry_after_ms == 250
    gate.set_room(room(3, lowest=Priority.CRITICAL, received=[1, 2]))  # one of them has started
    gate.claim(request(4))
    with pytest.raises(WaitingSetFull):
        gate.claim(request(5))
    gate.forget(4)
    gate.claim(request(6))


def test_a_class_that_may_take_a_place_is_left_to_the_engine() -> None:
    gate = AdmissionGate()
    gate.set_room(room(4, lowest=Priority.NORMAL))
    gate.claim(request(1, priority=Priority.HIGH))
    for priority in (Priority.NORMAL, Priority.LOW):
        with pytest.raises(WaitingSetFull):
            gate.claim(request(2, priority=priority))


def test_a_better_class_may_take_the_place_of_what_was_sent_since() -> None:
    gate = AdmissionGate()
    gate.set_room(room(3, lowest=Priority.CRITICAL))
    gate.claim(request(1, priority=Priority.LOW))
    gate.claim(request(2, priority=Priority.CRITICAL))
    with pytest.raises(WaitingSetFull):
        gate.claim(request(3, priority=Priority.LOW))
    gate.forget(1)
    with pytest.raises(WaitingSetFull):
        gate.claim(request(4, n=4, priority=Priority.CRITICAL))  # nothing of a lower class is left


def test_sequences_and_tokens_are_counted() -> None:
    gate = AdmissionGate()
    gate.set_room(room(2, tokens=90, lowest=Priority.CRITICAL))
    with pytest.raises(WaitingSetFull, match="2 of 4 requests"):
        gate.claim(request(1, n=3))
    with pytest.raises(WaitingSetFull, match="90 of 100 tokens, and this prompt has 12"):
        gate.claim(request(1, n=2, num_tokens=6))
    gate.claim(request(1, n=2, num_tokens=5))


def test_a_refusal_names_the_cache_while_the_first_request_waits_for_its_blocks() -> None:
    gate = AdmissionGate()
    gate.set_room(room(4, lowest=Priority.CRITICAL, shortage=BlockShortage(num_needed=9, num_free=2)))
    with pytest.raises(KvCacheFull, match=r"4 of 4 requests; .* 9 must be free, and 2 are") as caught:
        gate.claim(request(1))
    assert (caught.value.tag, caught.value.retry_after_ms) == ("TW-KV-FULL", 250)
    gate.set_room(None)
    for key in range(4):
        gate.claim(request(key))
    with pytest.raises(WaitingSetFull) as of_next:
        gate.claim(request(4))
    assert of_next.value.tag == "TW-BUSY"


def test_a_new_engine_starts_empty_under_the_same_bound() -> None:
    gate = AdmissionGate()
    gate.set_room(room(4, lowest=Priority.CRITICAL))
    gate.set_room(None)
    gate.claim(request(1, n=2))
    gate.claim(request(2, n=2))
    with pytest.raises(WaitingSetFull, match="4 of 4"):
        gate.claim(request(3))


class CountingRequest:
    """Counts how often it is looked at."""

    prompt = bytes(16)

    def __init__(self, key: int) -> None:
        self.key = key
        self.num_looks = 0

    @property
    def options(self) -> RequestOptions:
        self.num_looks += 1
        return RequestOptions()


def test_a_claim_looks_at_no_earlier_one() -> None:
    """The number of looks at a request does not depend on how many are sent behind it."""
    looks = {}
    for num_sent in (1, 500):
        gate = AdmissionGate()
        gate.set_room(room(0, most=1000))
        requests: list[Any] = [CountingRequest(key) for key in range(num_sent)]
        for one in requests:
            gate.claim(one)
        gate.forget(0)
        gate.set_room(room(1, most=1000, received=[1]))
        looks[num_sent] = requests[0].num_looks
    assert looks[500] == looks[1]


def test_a_front_end_refuses_without_asking_the_engine(tmp_path: Path) -> None:
    harness = FrontendHarness(tmp_path)
    try:
        harness.frontend.on_room(room(4))
        assert "TW-BUSY" in harness.refuse(text="Hello", parameters={"priority": 4})
        assert not harness.engine.added
        stats = harness.frontend.stats()
        assert sum(stats.refusal_time.counts) == stats.rejected["TW-BUSY"] == 1
        harness.frontend.on_lost([], EngineDead("the engine is gone"))
        assert harness.submit().key in harness.engine.added
    finally:
        harness.close()


class SlowDoor(AdmissionGate):
    """Counts a request only after it was answered, and notes the requests that are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks: queue.Queue[RecordingSink] = queue.Queue()
        self.forgotten: queue.Queue[int] = queue.Queue()
        self.before_claim: Callable[[int], None] | None = None

    def claim(self, message: AddRequest) -> None:
        if self.before_claim is not None:
            self.before_claim(message.key)
            self.sinks.get(timeout=TIMEOUT_S).wait_end()
        super().claim(message)

    def forget(self, key: int) -> None:
        super().forget(key)
        self.forgotten.put(key)


def test_what_the_engine_did_not_take_leaves_its_place(tmp_path: Path) -> None:
    """Holds even if the request was answered just before its place was counted."""
    gate = SlowDoor()
    harness = FrontendHarness(tmp_path, gate=gate)
    try:
        harness.engine.refusal = EngineDead("the engine is gone")
        gate.before_claim = lambda key: harness.deliver(key, finish_reason="error", error=error_info())
        gate.sinks.put(harness.submit_at_now())
        # Forgotten when it is answered, and when it is not sent.
        assert gate.forgotten.get(timeout=TIMEOUT_S) == gate.forgotten.get(timeout=TIMEOUT_S)
        assert not gate._unheard
        harness.engine.refusal = gate.before_claim = None
        assert harness.submit().key in harness.engine.added
    finally:
        harness.close()


def test_cancelled_while_the_engine_takes_it_leaves_its_place(tmp_path: Path) -> None:
    """The engine may never hear of it, so its word cannot be waited for."""
    harness, sink, cancelled = FrontendHarness(tmp_path), RecordingSink(), threading.Event()
    add, cancel = harness.engine.add, harness.engine.cancel

    def slow(message: Any) -> None:
        sink.gone.set()
        sink.wait_end()
        add(message)

    def note(key: int) -> None:
        cancel(key)
        cancelled.set()

    harness.engine.add, harness.engine.cancel = slow, note  # type: ignore[method-assign]
    harness.submit("x", sink)
    assert cancelled.wait(TIMEOUT_S)
    harness.close()  # behind the thread that tells the engine
    assert not harness.frontend.gate._unheard


# --- holding back -------------------------------------------------------------------------------------------------


def is_open(gate: AdmissionGate) -> bool:
    """Whether `wait` returns at once."""
    with pytest.MonkeyPatch.context() as patch:
        found: list[bool] = []
        patch.setattr(gate._changed, "wait_for", lambda condition: found.append(condition()))
        gate.wait()
        return all(found)


def holding_gate(max_requests: int = 4, max_tokens: int = 100) -> AdmissionGate:
    gate = AdmissionGate(holds=True)
    gate.set_room(Room(0, max_requests, 0, max_tokens, 0, 250, None, []))
    return gate


def test_it_closes_at_either_bound() -> None:
    gate = holding_gate(2, 10)
    for key in (1, 2):
        assert is_open(gate)
        gate.enter(key)
    assert not is_open(gate)
    gate.forget(1)
    gate.claim(request(2, num_tokens=10))
    assert not is_open(gate)
    gate.claim(request(2, num_tokens=9))
    assert is_open(gate)
    gate.claim(request(2, n=2, num_tokens=4))
    assert not is_open(gate)


def test_requests_of_other_front_ends_count() -> None:
    gate = holding_gate(2)
    gate.set_room(room(2, most=2))
    assert not is_open(gate)
    gate.set_room(room(1, most=2))
    assert is_open(gate)


def test_it_opens_when_the_engine_says_that_one_has_started() -> None:
    gate = holding_gate(1)
    gate.claim(request(1))
    gate.set_room(room(1, most=1, received=[1]))
    assert not is_open(gate)
    gate.set_room(room(0, most=1))
    assert is_open(gate)


def test_held_requests_are_offered_in_order_as_far_as_they_fit() -> None:
    gate = holding_gate(4)
    gate.set_room(room(4))
    for key, n in ((3, 1), (1, 2), (2, 1), (4, 3)):
        assert gate.hold(request(key, n=n))
    assert gate.release() == []
    gate.set_room(room(1))
    assert gate.release() == [3, 1]
    assert gate.release() == []
    gate.set_room(room(0, received=[3, 1]))
    assert gate.release() == [2, 4]
    assert not is_open(gate)
    gate.forget(4)
    assert is_open(gate)


def test_none_comes_in_before_a_held_one() -> None:
    gate = holding_gate(4)
    gate.set_room(room(2))
    gate.hold(request(1, n=3))
    assert not is_open(gate)  # though there is room for a smaller one
    gate.forget(1)
    assert is_open(gate)


def test_behind_a_closed_door_none_waits() -> None:
    gate = holding_gate(1, 1)
    gate.enter(1)
    waiting = threading.Thread(target=gate.wait)
    waiting.start()
    gate.close()
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()


class DoorMachine(RuleBasedStateMachine):
    """Both doors against a plain account of what is unheard and held."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.gate = AdmissionGate(holds=True)
        self.refusing = AdmissionGate()
        self.unheard: dict[int, tuple[int, int, int]] = {}
        self.held: dict[int, tuple[int, int, int]] = {}
        self.room = (0, 0)
        self.num_keys = 0

    @rule(target=keys)
    def enter(self) -> int:
        self.num_keys += 1
        self.gate.enter(self.num_keys)
        self.unheard[self.num_keys] = (1, 0, 1)
        return self.num_keys

    @rule(key=keys, n=st.integers(1, 4), num_tokens=st.integers(0, 25), priority=st.integers(1, 4))
    def claim(self, key: int, n: int, num_tokens: int, priority: int) -> None:
        self.gate.claim(request(key, n=n, num_tokens=num_tokens, priority=priority))
        self.refusing._count(key, self.gate._unheard[key])
        self.unheard[key] = (n, n * num_tokens, priority)

    @rule(num=st.integers(0, 5), tokens=st.integers(0, 90), received=st.lists(keys, max_size=3))
    def hear(self, num: int, tokens: int, received: list[int]) -> None:
        self.room = (num, tokens)
        for gate in (self.gate, self.refusing):
            gate.set_room(room(num, tokens=tokens, received=received))
        for key in received:
            self.unheard.pop(key, None)

    @rule(key=keys, n=st.integers(1, 4))
    def hold(self, key: int, n: int) -> None:
        if key not in self.unheard:
            self.gate.hold(request(key, n=n))
            self.held[key] = (n, 4 * n, 3)

    @rule(key=keys | consumes(keys))
    def forget(self, key: int) -> None:
        for account in (self.unheard, self.held):
            account.pop(key, None)
        for gate in (self.gate, self.refusing):
            gate.forget(key)

    @rule()
    def offer(self) -> None:
        offered = self.gate.release()
        for key in offered:
            self.unheard[key] = self.held.pop(key)
            assert self.gate._room is None or self.fits(0, 0)
            self.refusing._count(key, self.gate._unheard[key])
        if self.held:
            n, num_tokens, _ = next(iter(self.held.values()))
            assert not self.fits(n, num_tokens)

    @invariant()
    def is_open_while_there_is_room(self) -> None:
        assert is_open(self.gate) == (not self.held and (self.gate._room is None or self.fits(1, 1)))

    @invariant()
    def classes_are_counted(self) -> None:
        entered = {key: one for key, one in self.unheard.items() if key in self.refusing._unheard}
        counts = [sum(one[2] == priority for one in entered.values()) for priority in Priority]
        assert self.refusing._num_by_class[1:] == counts

    def fits(self, n: int, num_tokens: int) -> bool:
        waiting = self.room[0] + n + sum(one[0] for one in self.unheard.values())
        tokens = self.room[1] + num_tokens + sum(one[1] for one in self.unheard.values())
        return waiting <= 4 and tokens <= 100


TestDoor = DoorMachine.TestCase


# --- a front end behind a gate that holds back --------------------------------------------------------------------


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[FrontendHarness]:
    harness = FrontendHarness(tmp_path, gate=holding_gate(2))
    yield harness
    harness.close()


def refuse(harness: FrontendHarness, submitted: Submitted, waiting: int = 2, error: ErrorInfo = FULL) -> None:
    """As the engine does: first it says how full it is."""
    harness.frontend.on_room(room(waiting, most=2, received=[submitted.key]))
    harness.deliver(submitted.key, [], "error", error=error, index=WHOLE_REQUEST)


def wait_sent(harness: FrontendHarness, count: int) -> None:
    harness.engine.wait(lambda: harness.engine.num_added >= count)


class Waiter:
    """A thread in `AdmissionGate.wait`, as Triton's in `execute`."""

    def __init__(self, harness: FrontendHarness) -> None:
        self._gate = harness.frontend.gate
        self._thread = threading.Thread(target=harness.frontend.gate.wait)
        self._thread.start()

    @property
    def is_held(self) -> bool:
        return not self._gate._fits(_Claim(1, 1)) and self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


def test_a_start_makes_room(harness: FrontendHarness) -> None:
    first = harness.submit(stream=True)
    harness.frontend.gate.wait()
    second = harness.submit(stream=True)
    waiter = Waiter(harness)
    assert waiter.is_held
    harness.frontend.on_room(room(1, most=2, received=[first.key, second.key]))
    waiter.join()


@pytest.mark.parametrize("how", ["error", "cancel", "lost"])
def test_an_end_without_a_token_makes_room(harness: FrontendHarness, how: str) -> None:
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


def test_the_sequences_of_a_request_count(harness: FrontendHarness) -> None:
    key, _ = harness.submit(stream=True, parameters={"n": 2})
    waiter = Waiter(harness)
    assert waiter.is_held
    harness.frontend.on_room(room(1, most=2, received=[key]))
    waiter.join()


def test_prompt_tokens_count(harness: FrontendHarness) -> None:
    submitted = harness.submit("x" * 100, stream=True)
    waiter = Waiter(harness)
    assert waiter.is_held
    harness.finish(submitted, "y")
    waiter.join()


def test_a_request_that_is_wrong_holds_nothing_up(harness: FrontendHarness) -> None:
    for _ in range(5):
        harness.refuse(text="")
        harness.frontend.gate.wait()


def test_what_the_engine_has_no_room_for_is_sent_again(harness: FrontendHarness) -> None:
    """Another front end's requests fill the waiting set."""
    submitted = harness.submit(stream=True)
    for count in (2, 3, 4):
        refuse(harness, submitted)
        harness.frontend.on_room(room(1, most=2))
        wait_sent(harness, count)
    harness.frontend.on_room(room(0, most=2))
    assert harness.engine.num_added == 4  # it is there
    assert harness.finish(submitted, "the fox").text == "the fox"
    assert submitted.sink.num_ends == 1


def test_room_that_was_made_before_the_refusal_came_is_used(harness: FrontendHarness) -> None:
    submitted = harness.submit(stream=True)
    refuse(harness, submitted, waiting=0)
    wait_sent(harness, 2)
    assert harness.finish(submitted, "x").finish_reason == "length"


def test_other_refusals_end_the_request(harness: FrontendHarness) -> None:
    submitted = harness.submit(stream=True)
    refuse(harness, submitted, error=RATE)
    submitted.sink.wait_end()
    assert str(submitted.sink.error) == "[TW-BUSY retry_after_ms=250] tenant acme is over its rate"


def test_where_nothing_is_held_a_full_waiting_set_ends_it(tmp_path: Path) -> None:
    harness = FrontendHarness(tmp_path)
    submitted = harness.submit(stream=True)
    refuse(harness, submitted)
    submitted.sink.wait_end()
    assert str(submitted.sink.error) == "[TW-BUSY retry_after_ms=250] waiting set is full: 2 of 2 requests"
    harness.frontend.gate.wait()
    harness.close()


def test_what_the_door_refuses_is_reported_by_tenant(tmp_path: Path) -> None:
    harness = FrontendHarness(tmp_path)
    harness.frontend.on_room(room(2, most=2, received=[]))
    sink = harness.submit_at_now(parameters={"tenant": "acme", "n": 2, "priority": 4})
    sink.wait_end()
    assert "waiting set is full" in str(sink.error)
    assert harness.engine.refused == {"acme": 2} and not harness.engine.added
    harness.close()


def test_a_held_request_can_be_cancelled(harness: FrontendHarness) -> None:
    submitted = harness.submit(stream=True)
    refuse(harness, submitted)
    waiter = Waiter(harness)
    submitted.sink.gone.set()
    submitted.sink.wait_end()
    assert submitted.sink.finish_reason == "cancelled"
    harness.frontend.on_room(room(0, most=2))
    waiter.join()
    assert harness.engine.num_added == 1


def test_a_held_request_ends_at_its_deadline(harness: FrontendHarness) -> None:
    submitted = harness.submit(stream=True, parameters={"deadline_ms": 1e9})
    refuse(harness, submitted)
    harness.frontend._expire(harness.frontend._live[submitted.key])
    submitted.sink.wait_end()
    assert str(submitted.sink.error).startswith("[TW-DEADLINE]")
    assert harness.frontend.stats().rejected == {"TW-DEADLINE": 1}


def test_an_engine_that_is_gone_ends_what_is_sent_again(harness: FrontendHarness) -> None:
    submitted = harness.submit(stream=True)
    refuse(harness, submitted)
    waiter = Waiter(harness)
    harness.engine.refusal = EngineDead("gone for good")
    harness.frontend.on_lost([], EngineDead("gone"))
    submitted.sink.wait_end()
    assert str(submitted.sink.error) == "[TW-ENGINE-DEAD] gone for good"
    waiter.join()


def test_closing_opens_the_door(harness: FrontendHarness) -> None:
    sinks: list[RecordingSink] = [harness.submit(stream=True).sink for _ in range(2)]
    waiter = Waiter(harness)
    harness.close()
    waiter.join()
    assert [str(sink.error) for sink in sinks] == ["[TW-DRAINING] the server is shutting down"] * 2
