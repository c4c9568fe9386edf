"""The step loop over the real scheduler and a runner that tells on every misuse of the batch protocol."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.core_harness import FIRST_STEP_S, CoreHarness, arrivals
from support.engine.fake_runner import FakeRunner, PendingTokens
from support.long_runs import examples
from support.scheduler.scheduling import make_request
from tidewheel.batch import RowError, SampledTokens, ScheduledBatch
from tidewheel.engine.shared_device import UnsharedDevice
from tidewheel.errors import Busy, DeadlineExceeded, EngineDead, InvalidRequest, NotFound
from tidewheel.request import FinishReason, Priority


class ScriptedArbiter(UnsharedDevice):
    """A device whose turn comes by a script of y and n."""

    def __init__(self, script: str, runner: FakeRunner) -> None:
        self._script = deque(script)
        self._runner = runner
        self.classes: list[int] = []

    def take(self, best_class: Callable[[], int]) -> bool:
        self.classes.append(best_class())
        return not self._script or self._script.popleft() == "y"

    def give_back(self, *, ran: bool) -> None:
        assert not self._runner.in_flight


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's."""


def test_a_step_is_one_token_each() -> None:
    harness = CoreHarness()
    harness.add(make_request("a", 4, max_tokens=2))
    harness.add(make_request("b", 3, max_tokens=1))
    assert harness.core.step()
    assert {name: len(tokens) for name, tokens in harness.delivered.items()} == {"a": 1, "b": 1}
    assert harness.ended == {"b": FinishReason.LENGTH}
    assert harness.core.step()
    assert not harness.core.step()
    harness.run()


def test_each_step_is_announced_with_its_predicted_time() -> None:
    harness = CoreHarness()
    harness.add(make_request("a", 4, max_tokens=4))
    harness.run()  # a step takes one second of the script
    assert harness.beats[0] == FIRST_STEP_S
    assert harness.beats[1] > FIRST_STEP_S  # the one before may be in flight
    assert harness.beats[2:] == [pytest.approx(2.0)] * 2


@pytest.mark.parametrize("max_inflight_steps", [1, 2])
def test_steps_run_by_turns_and_end_before_the_device_is_given_back(max_inflight_steps: int) -> None:
    harness = CoreHarness(max_inflight_steps=max_inflight_steps)
    arbiter = harness.core.arbiter = ScriptedArbiter("yynyyynnyyyyyy", harness.runner)
    harness.add(make_request("a", 4, max_tokens=5))
    worked = [harness.core.step() for _ in range(12)]
    assert harness.ended == {"a": FinishReason.LENGTH} and not all(worked[:8])
    assert arbiter.classes[:2] == [int(Priority.NORMAL)] * 2 and arbiter.classes[-1] == 0
    harness.run()


def test_two_steps_in_flight_answer_one_step_later() -> None:
    harness = CoreHarness(max_inflight_steps=2)
    harness.add(make_request("a", 4, max_tokens=3))
    assert harness.core.step()
    assert harness.delivered == {"a": []}
    assert harness.core.step()
    assert len(harness.delivered["a"]) == 1
    harness.run()
    assert len(harness.delivered["a"]) == 3


def test_cancel_while_the_device_is_busy_stops_the_token() -> None:
    harness = CoreHarness()
    harness.add(make_request("a", 4))
    harness.commands += [lambda: None, lambda: harness.core.cancel("a")]
    assert harness.core.step()
    assert harness.ended == {"a": FinishReason.CANCELLED}
    assert harness.delivered == {"a": []}
    harness.run()


def test_cancel_of_unknown_and_ended_requests_is_nothing() -> None:
    harness = CoreHarness()
    harness.core.cancel("never seen")
    harness.add(make_request("a", 4, max_tokens=1))
    harness.run()
    harness.core.cancel("a")
    assert harness.ended == {"a": FinishReason.LENGTH}


def test_refusals_are_raised_and_deliver_nothing() -> None:
    harness = CoreHarness(num_blocks=4, max_waiting_requests=1)
    with pytest.raises(InvalidRequest):
        harness.core.add_group([make_request("too large", 16, max_tokens=8)])
    harness.add(make_request("a", 4))
    with pytest.raises(Busy):
        harness.core.add_group([make_request("b", 4)])
    harness.run()


def test_fail_all_ends_everything_once() -> None:
    harness = CoreHarness(max_inflight_steps=2)
    for name in "abcdef":
        harness.add(make_request(name, 4))
    harness.core.step()
    harness.core.fail_all(EngineDead("gone"))
    assert set(harness.ended.values()) == {FinishReason.ERROR}
    assert all(request.error is not None for request in harness.requests.values())
    harness.runner.in_flight.clear()
    harness.run()


def test_deadlines_are_looked_at_before_every_step() -> None:
    harness = CoreHarness(max_num_seqs=1)
    harness.add(make_request("runs", 4, max_tokens=50, deadline=6.5))
    harness.add(make_request("waits", 4, deadline=6.5))
    harness.run()
    assert harness.ended == {"runs": FinishReason.DEADLINE, "waits": FinishReason.ERROR}
    assert isinstance(harness.requests["waits"].error, DeadlineExceeded)
    assert 0 < len(harness.delivered["runs"]) < 50


def test_who_loses_its_place_is_told() -> None:
    harness = CoreHarness(max_waiting_requests=1)
    harness.add(make_request("low", 4, priority=Priority.LOW))
    harness.add(make_request("high", 4, priority=Priority.HIGH))
    assert harness.ended == {"low": FinishReason.ERROR}
    assert isinstance(harness.requests["low"].error, Busy)
    harness.run()


def test_a_group_is_one_prompt_and_several_ends() -> None:
    harness = CoreHarness()
    leader = make_request("a", 9, max_tokens=2)
    requests = [leader, *(make_request(name, 9, max_tokens=2, leader=leader) for name in "bc")]
    for request in requests:
        harness.accept(request)
    harness.core.add_group(requests)
    harness.run()
    assert harness.core.stats().num_scheduled_tokens == 9 + 2 + 3


def test_a_session_that_nobody_has_cannot_be_closed() -> None:
    with pytest.raises(NotFound):
        CoreHarness().scheduler.close_session("tenant", "s")


@settings(max_examples=examples(50, 150), deadline=None)
@given(
    events=arrivals(),
    num_blocks=st.integers(10, 24),
    budget=st.integers(1, 24),
    num_seqs=st.integers(1, 5),
    inflight=st.sampled_from([1, 2]),
    prefix_caching=st.booleans(),
)
def test_every_request_ends_exactly_once_with_its_own_tokens(
    events: list[tuple[str, object]],
    num_blocks: int,
    budget: int,
    num_seqs: int,
    inflight: int,
    prefix_caching: bool,
) -> None:
    harness = CoreHarness(
        num_blocks=num_blocks,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=budget,
        max_num_seqs=num_seqs,
        max_inflight_steps=inflight,
    )
    harness.play(events)
    harness.run()


class SmallDevice(FakeRunner):
    """Runs out of memory, when launched or when waited for, in steps with more tokens than it has room for."""

    room = 8
    last_step = -1
    fails_late = False
    error: Exception = OutOfMemoryError("CUDA out of memory")

    def launch(self, batch: ScheduledBatch) -> PendingTokens:
        if batch.step_id != self.last_step:  # rows change before the device is used, and only once
            self.last_step = self.num_steps = batch.step_id
            super()._update_rows(batch)
        if batch.num_tokens <= self.room:
            return super().launch(batch)
        if self.fails_late:
            return LateFailure(self.error)  # type: ignore[return-value]
        raise self.error

    def _update_rows(self, batch: ScheduledBatch) -> None:
        """Done."""


class LateFailure:
    is_done = None

    def __init__(self, error: Exception) -> None:
        self.error = error

    def wait(self) -> SampledTokens:
        raise self.error


def small_device(**fields: object) -> CoreHarness:
    harness = CoreHarness(max_num_batched_tokens=32)
    harness.runner.__class__ = SmallDevice
    for name, value in fields.items():
        setattr(harness.runner, name, value)
    return harness


@pytest.mark.parametrize("fails_late", [False, True], ids=["launch", "wait"])
@pytest.mark.parametrize(
    "error", [OutOfMemoryError("x"), MemoryError(), RuntimeError("can't allocate memory: x")], ids=str
)
def test_out_of_memory_ends_the_longest_chunk_alone(error: Exception, fails_late: bool) -> None:
    harness = small_device(error=error, fails_late=fails_late)
    for name, length in (("a", 3), ("longest", 12), ("b", 4)):
        harness.add(make_request(name, length))
    harness.run()
    assert harness.ended == {"a": FinishReason.LENGTH, "longest": FinishReason.ERROR, "b": FinishReason.LENGTH}
    error_text = str(harness.requests["longest"].error)
    assert "ran out of memory at 12 tokens" in error_text


def test_out_of_memory_of_a_single_request_leaves_the_engine_alive() -> None:
    harness = small_device(room=2)
    harness.add(make_request("a", 12))
    harness.run()
    harness.add(make_request("b", 2))
    harness.run()
    assert harness.ended == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}


def test_memory_that_never_suffices_is_an_error_of_the_engine() -> None:
    harness = small_device(room=0)
    for number, name in enumerate("abcd"):
        harness.add(make_request(name, [number] * 5))
    with pytest.raises(OutOfMemoryError):
        harness.core.step()
    assert list(harness.ended.values()) == [FinishReason.ERROR] * 3


class PickyDevice(SmallDevice):
    """Cannot launch the rows of some requests."""

    room = 1000

    def _check_shape(self, batch: ScheduledBatch) -> None:
        for new in batch.new_rows:
            if new.request.request_id.startswith("bad"):
                self.num_steps -= 1
                raise RowError(new.row) from ValueError("its bias")


@pytest.mark.parametrize("inflight", [1, 2])
def test_a_row_that_cannot_be_launched_ends_alone(inflight: int, caplog: pytest.LogCaptureFixture) -> None:
    harness = CoreHarness(max_num_batched_tokens=64, max_inflight_steps=inflight, runner=PickyDevice)
    for name in ("a", "bad 1", "b", "bad 2"):
        harness.add(make_request(name, 9, max_tokens=3))
    harness.core.step()
    harness.add(make_request("bad 3", 9))
    harness.add(make_request("c", 9))
    harness.run()
    bad = {f"bad {number}": FinishReason.ERROR for number in (1, 2, 3)}
    assert harness.ended == {**bad, **dict.fromkeys("abc", FinishReason.LENGTH)}
    assert "sampling of this request failed" in str(harness.requests["bad 1"].error)
    causes = [record.exc_info[1].__cause__ for record in caplog.records if record.exc_info and record.exc_info[1]]
    assert [str(cause) for cause in causes] == ["its bias"] * 3


def test_nothing_is_received_until_a_step_that_could_not_be_launched_was_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it loads, such as an adapter, could be dropped: the rows that need it may be cancelled meanwhile."""
    harness = CoreHarness(max_num_batched_tokens=64, max_inflight_steps=2, runner=PickyDevice)
    harness.add(make_request("a", 9, max_tokens=9))
    harness.core.step()
    for number, name in enumerate(("bad", "b"), 1):
        harness.add(make_request(name, [number] * 9, max_tokens=3))
    calls: list[str] = []
    launch = harness.runner.launch
    monkeypatch.setattr(harness.core, "receive", lambda: calls.append("receive"))
    monkeypatch.setattr(harness.runner, "launch", lambda batch: calls.append("launch") or launch(batch))
    harness.core.step()
    assert calls == ["receive", "launch", "launch", "receive"]
    harness.run()
    assert harness.ended == {"a": FinishReason.LENGTH, "bad": FinishReason.ERROR, "b": FinishReason.LENGTH}


@pytest.mark.parametrize("fails_late", [False, True], ids=["launch", "wait"])
def test_other_errors_of_a_step_are_raised(fails_late: bool) -> None:
    harness = small_device(error=RuntimeError("device-side assert"), fails_late=fails_late, room=0)
    harness.add(make_request("a", 5))
    with pytest.raises(RuntimeError, match="device-side assert"):
        harness.core.step()
    harness.core.fail_all(EngineDead("a step failed"))
    assert harness.ended == {"a": FinishReason.ERROR}


def test_stats_measure_the_time_between_two_calls() -> None:
    harness = CoreHarness()
    harness.add(make_request("a", 4, max_tokens=4))
    harness.core.step()
    first = harness.core.stats()
    assert (first.num_steps, first.num_scheduled_tokens, first.num_running) == (1, 4, 1)
    assert first.busy_fraction == pytest.approx(first.step_seconds / harness.now)
    harness.now += 100.0
    assert harness.core.stats().busy_fraction == 0.0
    harness.run()


def test_stats_have_the_age_of_the_oldest_in_each_class() -> None:
    harness = CoreHarness(max_num_seqs=1)
    harness.add(make_request("running", 4, max_tokens=4))
    harness.core.step()
    for seconds, priority in enumerate((Priority.LOW, Priority.LOW, Priority.HIGH)):
        harness.add(make_request(f"{seconds}", 4, arrival_time=float(seconds), priority=priority))
    harness.core.step()
    harness.now = 10.0
    assert harness.core.stats().oldest_wait_by_class == [0.0, 8.0, 0.0, 10.0]
    harness.run()
