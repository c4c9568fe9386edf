"""Requests before the tokenizer: who is next, what long prompts leave to short ones, and deadlines meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engine.fake_engine import TIMEOUT_S, RecordingSink
from support.frontend.front_ends import FrontendHarness
from tidewheel.frontend.admission_gate import _AGEING_NS, _LONG_PROMPT_BYTES, PromptQueue
from tidewheel.frontend.coercion import ParameterSource
from tidewheel.frontend.live_request import LiveRequest
from tidewheel.frontend.request_parameters import GenerateRequest, read_urgency
from tidewheel.request import Priority
from tidewheel.request_options import RequestOptions
from tidewheel.tenants import TenantLimits

CRITICAL, HIGH, NORMAL, LOW = Priority
SECOND = 10**9


class Queue:
    """Requests are named by their keys; their arrival is `now_ns`."""

    def __init__(self, num_threads: int = 2) -> None:
        self.now_ns = 0
        self.queue = PromptQueue(1 << 20, num_threads)
        self.num_put = 0

    def put(
        self,
        priority: int = NORMAL,
        deadline_s: float = 0,
        soft_s: float = 0,
        num_bytes: int = 1,
        **parameters: object,
    ) -> int:
        self.num_put += 1
        source = ParameterSource(origin="sampling_parameters", values=parameters)
        asked = GenerateRequest(text="x" * num_bytes, parameters=(source,), arrival_ns=self.now_ns)
        urgency = RequestOptions(
            priority=Priority(priority), deadline_ms=1e3 * deadline_s or None, soft_deadline_ms=1e3 * soft_s or None
        )
        self.queue.put(LiveRequest(self.num_put, asked, RecordingSink(), urgency=urgency))
        return self.num_put

    def take(self, *, done: bool = True) -> LiveRequest:
        request = self.queue.take()
        assert request is not None
        if done:
            self.queue.done(request)
        return request

    def order(self) -> list[int]:
        return [self.take().key for _ in range(self.queue._num_requests)]


def test_a_better_class_is_first_then_an_earlier_deadline_then_an_earlier_arrival() -> None:
    queue = Queue()
    low, normal, other = queue.put(LOW, deadline_s=0.1), queue.put(NORMAL), queue.put(NORMAL)
    late, soon, soft = queue.put(HIGH, deadline_s=5), queue.put(HIGH, deadline_s=1), queue.put(HIGH, soft_s=3)
    critical = queue.put(CRITICAL)
    assert queue.order() == [critical, soon, soft, late, normal, other, low]


def test_waiting_lifts_a_request_above_a_flood_of_a_better_class() -> None:
    queue = Queue()
    low = queue.put(LOW)
    for _ in range(2):
        queue.now_ns += _AGEING_NS
        queue.put(CRITICAL)
        assert queue.take().key != low
    queue.now_ns += _AGEING_NS
    queue.put(CRITICAL)
    assert queue.take().key == low


def test_a_far_deadline_is_not_starved_by_near_ones() -> None:
    queue = Queue()
    patient = queue.put(deadline_s=86_400)
    queue.now_ns += _AGEING_NS
    queue.put(deadline_s=0.001)
    assert queue.take().key == patient


def test_long_prompts_leave_a_thread_to_short_ones() -> None:
    queue = Queue(num_threads=3)
    longs = [queue.put(CRITICAL, num_bytes=_LONG_PROMPT_BYTES + 1) for _ in range(3)]
    short = queue.put(LOW)
    first, second = queue.take(done=False), queue.take(done=False)
    assert [first.key, second.key] == longs[:2]
    assert queue.take().key == short
    queue.queue.done(first)
    assert queue.take().key == longs[2]


def test_a_long_prompt_waits_for_another_and_wakes() -> None:
    queue = Queue()
    queue.put(num_bytes=_LONG_PROMPT_BYTES + 1)
    queue.put(num_bytes=_LONG_PROMPT_BYTES + 1)
    first = queue.take(done=False)
    taken: list[LiveRequest] = []
    taker = threading.Thread(target=lambda: taken.append(queue.take()))
    taker.start()
    short = queue.put()
    taker.join(TIMEOUT_S)
    assert [request.key for request in taken] == [short]
    queue.queue.done(first)
    assert queue.take().key == 2


def test_what_waits_is_bounded_until_it_is_done() -> None:
    queue = Queue()
    queue.put(num_bytes=1000)
    request = queue.take(done=False)
    free = 64 * (1 << 20) - 1000
    assert queue.queue.refusal(free) is None
    refusal = queue.queue.refusal(free + 1)
    assert refusal is not None
    assert "1000 of 67108864 prompt bytes" in str(refusal)
    queue.queue.done(request)
    assert queue.queue.refusal(free + 1) is None


def test_a_closed_queue_drops_what_waits() -> None:
    queue = Queue()
    queue.put()
    queue.queue.close()
    assert queue.queue.take() is None


# --- urgency before the parameters are checked --------------------------------------------------------------------


def urgency(**parameters: object) -> RequestOptions:
    source = ParameterSource(origin="sampling_parameters", values=parameters)
    request = GenerateRequest(text="x", parameters=(source,))
    return read_urgency(request, {"batch": TenantLimits(max_priority=LOW)})


def test_urgency_is_what_the_engine_will_be_told() -> None:
    assert urgency() == RequestOptions()
    given = urgency(priority="1", deadline_ms=2, soft_deadline_ms=1)
    assert (given.priority, given.deadline_ns(5), given.soft_deadline_ns(5)) == (CRITICAL, 2_000_005, 1_000_005)
    asked = GenerateRequest(text="x", timeout_us=7, arrival_ns=5)
    assert LiveRequest(1, asked, RecordingSink(), urgency=given).expires_ns == 7_005


def test_a_tenant_has_no_better_place_than_it_may_ask_for() -> None:
    assert urgency(priority=1, tenant="batch").priority is LOW
    assert urgency(priority=1, tenant="other").priority is CRITICAL


@pytest.mark.parametrize("wrong", [{"priority": 9}, {"priority": "x"}, {"deadline_ms": -1}, {"deadline_ms": []}])
def test_malformed_urgency_has_the_default_place(wrong: dict[str, object]) -> None:
    assert urgency(**wrong) == RequestOptions()


def test_urgency_looks_at_no_other_parameter() -> None:
    """An error in any of them would give the default place."""
    assert urgency(priority=2, logit_bias={"no id": "no number"}, unknown="x").priority is HIGH


# --- a front end whose tokenizer threads are blocked --------------------------------------------------------------


class Blocked:
    """A front end whose tokenizer does not end a prompt that begins with "slow" until `go_on` lets one go."""

    def __init__(self, folder: Path) -> None:
        self.harness = FrontendHarness(folder, max_prompt_bytes=4 * _LONG_PROMPT_BYTES)
        self._go_on = threading.Semaphore(0)
        self.prepared: list[str] = []
        self._in_work = threading.Semaphore(0)
        self._prepare = self.harness.frontend._reader.read
        self.harness.frontend._reader.read = self.prepare  # type: ignore[method-assign, assignment]

    def prepare(self, key: int, request: GenerateRequest) -> object:
        text = str(request.text)
        self.prepared.append(text[:8].strip())
        if text.startswith("slow"):
            self._in_work.release()
            assert self._go_on.acquire(timeout=TIMEOUT_S)
        return self._prepare(key, request)

    def go_on(self, count: int = 1) -> None:
        self._go_on.release(count)

    def occupy(self, count: int, size: int = 0) -> None:
        """Returns when so many slow prompts are in work."""
        for _ in range(count):
            self.submit("slow".ljust(size))
        for _ in range(count):
            assert self._in_work.acquire(timeout=TIMEOUT_S)

    def submit(self, text: str, **parameters: object) -> RecordingSink:
        return self.harness.submit_at_now(text=text, parameters=parameters)


@pytest.fixture
def blocked(tmp_path: Path) -> Iterator[Blocked]:
    blocked = Blocked(tmp_path)
    yield blocked
    blocked.go_on(10)
    blocked.harness.close()


def test_a_deadline_is_answered_while_all_tokenizer_threads_are_busy(blocked: Blocked) -> None:
    blocked.occupy(2)
    sink = blocked.submit("urgent", priority=1, deadline_ms=1)
    sink.wait_end()
    assert str(sink.error) == "[TW-DEADLINE] the deadline passed before the request could start"
    blocked.go_on(2)
    blocked.harness.engine.wait_added(2)
    assert blocked.prepared == ["slow", "slow"]  # and its prompt is not worked on any more


def test_a_deadline_is_answered_while_its_prompt_is_tokenised(blocked: Blocked) -> None:
    sink = blocked.submit("slow", deadline_ms=1)
    sink.wait_end()
    assert str(sink.error).startswith("[TW-DEADLINE]")
    assert sink.num_ends == 1


def test_the_timeout_of_triton_is_such_a_deadline(blocked: Blocked) -> None:
    blocked.occupy(2)
    sink = blocked.harness.submit_at_now(text="urgent", timeout_us=1)
    sink.wait_end()
    assert str(sink.error).startswith("[TW-DEADLINE]")


def test_prompts_are_tokenised_in_the_order_of_their_urgency(blocked: Blocked) -> None:
    blocked.occupy(2)
    for text, options in (
        ("low", {"priority": 4}),
        ("normal", {}),
        ("due", {"deadline_ms": 5_000_000}),
        ("critical", {"priority": 1}),
    ):
        blocked.submit(text, **options)
    blocked.go_on(1)
    blocked.harness.engine.wait_added(5)
    assert blocked.prepared[2:] == ["critical", "normal", "due", "low"]


def test_a_short_prompt_does_not_wait_for_long_ones(blocked: Blocked) -> None:
    blocked.occupy(1, size=_LONG_PROMPT_BYTES + 1)
    blocked.submit("slow".ljust(_LONG_PROMPT_BYTES + 1), priority=1)
    blocked.submit("short", priority=4)
    blocked.harness.engine.wait_added(1)
    assert blocked.prepared == ["slow", "short"]


def test_a_grammar_leaves_one_thread_to_others() -> None:
    """Trying one out may take a second."""
    queue = Queue(num_threads=2)
    first, second = queue.put(guided_json="{}"), queue.put(structured_outputs={"regex": "a"})
    plain = queue.put()
    taken = queue.take(done=False)
    assert (taken.key, queue.take().key) == (first, plain)
    queue.queue.done(taken)
    assert queue.take().key == second
