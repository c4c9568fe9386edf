from __future__ import annotations

import queue
from pathlib import Path

import pytest

from support.fake_engine import RecordingSink
from support.front_ends import Harness, error_info
from tidewheel.engine.messages import AddRequest, Room
from tidewheel.errors import EngineDead, WaitingSetFull
from tidewheel.frontend.vacancy import Vacancy
from tidewheel.request import Priority
from tidewheel.sampling import SamplingParams


def request(key: int, *, priority: int = 3, n: int = 1, num_tokens: int = 4) -> AddRequest:
    return AddRequest(key, bytes(4 * num_tokens), SamplingParams(max_tokens=1), priority=priority, n=n)


def room(waiting: int, *, tokens: int = 0, lowest: int = Priority.LOW, received: list[int] | None = None) -> Room:
    return Room(waiting, 4, tokens, 100, lowest, 250, received or [])


def test_until_the_engine_has_spoken_nothing_is_refused() -> None:
    vacancy = Vacancy()
    for key in range(100):
        vacancy.claim(request(key))


def test_what_was_sent_since_counts_until_the_engine_has_heard_of_it() -> None:
    vacancy = Vacancy()
    vacancy.hear(room(2, lowest=Priority.CRITICAL))
    vacancy.claim(request(1))
    vacancy.claim(request(2))
    with pytest.raises(WaitingSetFull, match="4 of 4 requests") as caught:
        vacancy.claim(request(3))
    assert caught.value.retry_after_ms == 250
    vacancy.hear(room(3, lowest=Priority.CRITICAL, received=[1, 2]))  # one of them has started
    vacancy.claim(request(4))
    with pytest.raises(WaitingSetFull):
        vacancy.claim(request(5))
    vacancy.forget(4)
    vacancy.claim(request(6))


def test_a_class_that_may_take_a_place_is_left_to_the_engine() -> None:
    vacancy = Vacancy()
    vacancy.hear(room(4, lowest=Priority.NORMAL))
    vacancy.claim(request(1, priority=Priority.HIGH))
    for priority in (Priority.NORMAL, Priority.LOW):
        with pytest.raises(WaitingSetFull):
            vacancy.claim(request(2, priority=priority))


def test_a_better_class_may_take_the_place_of_what_was_sent_since() -> None:
    vacancy = Vacancy()
    vacancy.hear(room(3, lowest=Priority.CRITICAL))
    vacancy.claim(request(1, priority=Priority.LOW))
    vacancy.claim(request(2, priority=Priority.CRITICAL))
    with pytest.raises(WaitingSetFull):
        vacancy.claim(request(3, priority=Priority.LOW))


def test_sequences_and_tokens_are_counted() -> None:
    vacancy = Vacancy()
    vacancy.hear(room(2, tokens=90, lowest=Priority.CRITICAL))
    with pytest.raises(WaitingSetFull, match="2 of 4 requests"):
        vacancy.claim(request(1, n=3))
    with pytest.raises(WaitingSetFull, match="90 of 100 tokens, and this prompt has 12"):
        vacancy.claim(request(1, n=2, num_tokens=6))
    vacancy.claim(request(1, n=2, num_tokens=5))


def test_a_new_engine_starts_empty() -> None:
    vacancy = Vacancy()
    vacancy.claim(request(1, n=4))
    vacancy.hear(room(4))
    vacancy.reset()
    vacancy.claim(request(2, priority=Priority.LOW))
    vacancy.hear(room(0, received=[2]))  # the first one went down with the old engine
    vacancy.claim(request(3, n=4))


def test_a_front_end_refuses_without_asking_the_engine(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    try:
        harness.frontend.on_room(room(4))
        assert "TW-BUSY" in harness.refuse(text="Hello", parameters={"priority": 4})
        assert not harness.engine.added
        stats = harness.frontend.stats()
        assert sum(stats.refusal_time.counts) == stats.rejected["TW-BUSY"] == 1
        harness.frontend.on_lost([], EngineDead("the engine is gone"))
        assert harness.submit().key in harness.engine.added
    finally:
        harness.frontend.close()


def test_what_the_engine_did_not_take_leaves_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the request was answered just before its place was counted."""
    harness, real, real_forget = Harness(tmp_path), Vacancy.claim, Vacancy.forget
    sinks, forgotten = queue.Queue[RecordingSink](), queue.Queue[int]()

    def claim_for_the_dead(vacancy: Vacancy, message: AddRequest) -> None:
        harness.deliver(message.key, finish_reason="error", error=error_info())
        sinks.get(timeout=30).wait_end()
        real(vacancy, message)

    def forget(vacancy: Vacancy, key: int) -> None:
        real_forget(vacancy, key)
        forgotten.put(key)

    def refuse(message: AddRequest) -> None:
        raise EngineDead("the engine is gone")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Vacancy, "claim", claim_for_the_dead)
            patch.setattr(Vacancy, "forget", forget)
            patch.setattr(harness.engine, "add", refuse)
            sinks.put(harness.submit_at_now())
            assert forgotten.get(timeout=30) == forgotten.get(timeout=30)  # answered, then not sent
        harness.frontend.on_room(room(3))
        assert harness.submit().key in harness.engine.added
    finally:
        harness.frontend.close()
