"""Threads of a step on a CPU, by measured use of processors."""

from __future__ import annotations

import queue
from unittest import mock

import pytest

from tidewheel.processor_use import PERIOD_S, ProcessorMeter, ProcessorUse
from tidewheel.runner import thread_count
from tidewheel.runner.thread_count import LONG_STEP_TOKENS, LOOK_S, ShortWaits, StepThreads


def test_threads_that_nobody_holds_up_stay() -> None:
    threads = StepThreads(2)
    assert threads.observe(ProcessorUse(used=1.8, idle=0.0, waited=0.2)) == 2
    assert threads.observe(ProcessorUse(used=0.0, idle=1.0, waited=0.0)) == 2  # beside a neighbour, without work


def test_a_late_thread_is_left_out_until_its_processor_is_free() -> None:
    threads = StepThreads(2)
    assert threads.observe(ProcessorUse(used=1.3, idle=0.0, waited=0.6)) == 1
    assert threads.observe(ProcessorUse(used=0.9, idle=0.1, waited=0.1)) == 1
    assert threads.observe(ProcessorUse(used=0.5, idle=0.5, waited=0.1)) == 1  # requests pause
    assert threads.observe(ProcessorUse(used=1.0, idle=0.7, waited=0.2)) == 2


def test_long_steps_run_in_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    set_numbers: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", set_numbers.append)
    monkeypatch.setattr(ProcessorMeter, "read", lambda _: None)
    threads = StepThreads(2)
    threads.observe(ProcessorUse(used=1.3, idle=0.0, waited=0.6))
    for num_tokens in (1, 16, LONG_STEP_TOKENS, 2048, 1):
        threads.adapt(num_tokens)
    assert set_numbers == [1, 2, 1]


def test_threads_with_a_processor_each_stay_whatever_waits() -> None:
    threads = StepThreads(2)
    assert threads.observe(ProcessorUse(used=1.4, idle=0.2, waited=0.5)) == 2 and not threads.are_late


def test_a_fixed_number_stays_and_is_late_until_threads_work_undisturbed() -> None:
    threads = StepThreads(2, is_fixed=True)
    assert threads.observe(ProcessorUse(used=1.0, idle=0.0, waited=0.9)) == 2 and threads.are_late
    threads.observe(ProcessorUse(used=0.1, idle=0.9, waited=0.0))  # requests pause
    assert threads.are_late
    threads.observe(ProcessorUse(used=1.9, idle=0.0, waited=0.1))
    assert not threads.are_late


def test_processes_that_give_way_are_noticed_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: queue.SimpleQueue[bool] = queue.SimpleQueue()
    monkeypatch.setattr(ProcessorMeter, "read", lambda _: ProcessorUse(used=0.0, idle=1.0, niced=1.0))
    monkeypatch.setattr(ShortWaits, "turn", lambda _, is_on: turns.put(is_on))
    monkeypatch.setattr(thread_count, "PERIOD_S", 0.001)
    threads = StepThreads(2)
    assert not turns.get(timeout=60) and threads.are_bound


def test_the_first_step_after_a_pause_is_looked_at_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []
    use, has_begun, threads = ProcessorUse(used=1.1, idle=0.1), mock.Mock(), mock.Mock()
    has_begun.wait.side_effect = [False, True, True]
    threads.observe = log.append
    monkeypatch.setattr("time.sleep", log.append)
    monkeypatch.setattr(ProcessorMeter, "read", lambda _: log.append("read") or use)  # type: ignore[func-returns-value]
    alive = iter((threads, threads, threads))
    with pytest.raises(StopIteration):
        thread_count._watch(lambda: next(alive), has_begun)
    assert log == ["read", use, "read", LOOK_S, "read", use, PERIOD_S, "read", use]


def test_threads_are_bound_while_others_give_way_and_leave_a_processor_for_each() -> None:
    threads = StepThreads(2)
    assert threads.observe(ProcessorUse(used=1.2, idle=0.2, waited=0.7, niced=0.6)) == 2
    assert threads.are_bound and not threads.are_late
    threads.observe(ProcessorUse(used=1.9, idle=0.0, waited=0.1))
    assert threads.are_bound  # between two ticks of the clock of such a process
    assert threads.observe(ProcessorUse(used=1.0, idle=0.0, waited=0.9, niced=0.1)) == 1 and not threads.are_bound
    for _ in range(8):
        threads.observe(ProcessorUse(used=1.9, idle=0.1))
    assert not threads.are_bound


def test_one_thread_stays_whatever_waits() -> None:
    assert StepThreads(1).observe(ProcessorUse(used=0.2, idle=0.0, waited=3.0)) == 1


@pytest.mark.parametrize(("waited", "left"), [(0.5, 15), (4.0, 12), (40.0, 1)])
def test_as_many_are_left_out_as_wait(waited: float, left: int) -> None:
    assert StepThreads(16).observe(ProcessorUse(used=12.0, idle=0.0, waited=waited)) == left
