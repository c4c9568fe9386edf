"""Sending a load: how many at a time, in which order, and what is kept when it is cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice

import pytest

from support.bench.runs import FakeTransport
from tidewheel.bench.driver import LoadDriver, RunLimits, RunProgress
from tidewheel.bench.outcome import (
    TIMEOUT,
    UNANSWERED,
    UNREADABLE,
    Conversation,
    OfferedRequest,
    RequestFailed,
    RequestOutcome,
)
from tidewheel.bench.workloads import WORKLOADS

LONG_S = 3600.0


def conversations(count: int, at: float = 0.0) -> list[Conversation]:
    return [(OfferedRequest(at, [index + 4], 3),) for index in range(count)]


def open_loop(transport: FakeTransport, load: list[Conversation], timeout_s: float = LONG_S) -> list[RequestOutcome]:
    progress = RunProgress()
    asyncio.run(LoadDriver(transport, RunLimits(LONG_S, timeout_s=timeout_s), progress).open_loop(load))
    return progress.outcomes


def closed_loop(
    transport: FakeTransport, load: Iterator[Conversation], users: int, limits: RunLimits
) -> list[RequestOutcome]:
    progress = RunProgress()
    asyncio.run(LoadDriver(transport, limits, progress).closed_loop(load, users))
    return progress.outcomes


def test_an_open_loop_does_not_wait_for_answers() -> None:
    async def until_all_are_there(transport: FakeTransport) -> None:
        while transport.most_running < 20:
            await asyncio.sleep(0)

    transport = FakeTransport(lambda _: until_all_are_there(transport))
    outcomes = open_loop(transport, conversations(20))
    assert [o.num_tokens for o in outcomes] == [3] * 20
    assert all(o.is_complete and o.finish_reason == "length" for o in outcomes)


@pytest.mark.parametrize("can_cancel", [True, False])
def test_a_settled_open_loop_cancels_the_rest_where_that_ends_it_on_the_server(can_cancel: bool) -> None:
    progress, transport = RunProgress(), FakeTransport(lambda outcome: after_the_first_two(outcome))
    transport.can_cancel = can_cancel

    async def after_the_first_two(outcome: RequestOutcome) -> None:
        while outcome.offered.input_ids[0] > 5 and (can_cancel or progress.num_ended < 2):
            await asyncio.sleep(0)

    loop = LoadDriver(transport, RunLimits(LONG_S), progress).open_loop(
        conversations(5), lambda: progress.num_ended == 2
    )
    asyncio.run(loop)
    assert [outcome.code for outcome in progress.outcomes] == ["", ""] + 3 * [UNANSWERED if can_cancel else ""]
    assert transport.running == 0


def test_a_closed_loop_has_as_many_in_flight_as_it_has_users() -> None:
    transport = FakeTransport()
    outcomes = closed_loop(transport, WORKLOADS["mixed"].conversations(0), 5, RunLimits(LONG_S, max_requests=60))
    assert transport.most_running == 5
    assert 60 <= len(outcomes) < 65


def test_a_closed_loop_ends_with_its_requests() -> None:
    assert len(closed_loop(FakeTransport(), iter(conversations(7)), 3, RunLimits(LONG_S))) == 7


def test_a_closed_loop_sends_nothing_after_its_time() -> None:
    assert closed_loop(FakeTransport(), iter(conversations(7)), 3, RunLimits(0.0)) == []


def test_a_later_turn_has_all_that_was_said_in_its_prompt() -> None:
    transport = FakeTransport()
    turns = (OfferedRequest(0.0, [10, 11], 2), OfferedRequest(0.0, [12], 1), OfferedRequest(0.0, [13], 4))
    outcomes = open_loop(transport, [turns])
    assert transport.prompts == [[10, 11], [10, 11, 7, 7, 12], [10, 11, 7, 7, 12, 7, 13]]
    assert [o.num_prompt_tokens for o in outcomes] == [2, 5, 7]


def test_a_conversation_ends_with_an_error() -> None:
    def refuse(outcome: RequestOutcome) -> None:
        raise RequestFailed("UNAVAILABLE", "[TW-BUSY] full")

    outcomes = open_loop(FakeTransport(refuse), [(OfferedRequest(0.0, [1], 1), OfferedRequest(0.0, [2], 1))])
    assert [(o.code, o.error) for o in outcomes] == [("TW-BUSY", "[TW-BUSY] full")]
    assert outcomes[0].ended is not None


def test_an_answer_that_makes_no_sense_costs_its_own_request_alone() -> None:
    def confuse(outcome: RequestOutcome) -> None:
        if outcome.offered.input_ids == [4]:
            raise KeyError("outputs")

    outcomes = open_loop(FakeTransport(confuse), conversations(3))
    assert [o.code for o in outcomes] == [UNREADABLE, "", ""]


def test_a_request_without_an_answer_ends_at_the_clients_limit() -> None:
    outcomes = open_loop(FakeTransport(lambda _: asyncio.Event().wait()), conversations(2), timeout_s=0.01)
    assert [o.code for o in outcomes] == [TIMEOUT] * 2


def test_what_was_sent_is_kept_when_the_run_is_cut_short() -> None:
    progress, hung = RunProgress(), asyncio.Event()

    def hang_on_the_second(outcome: RequestOutcome) -> object:
        if outcome.offered.input_ids == [5]:
            hung.set()
            return asyncio.Event().wait()
        return None

    async def cut() -> None:
        driver = LoadDriver(FakeTransport(hang_on_the_second), RunLimits(LONG_S), progress)
        task = asyncio.create_task(driver.open_loop(conversations(2)))
        await hung.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cut())
    assert [o.code for o in progress.outcomes] == ["", UNANSWERED]
    assert progress.num_ended == 1


def test_lateness_is_the_clients_and_is_told() -> None:
    outcomes = open_loop(FakeTransport(), list(islice(conversations(3, at=0.0), 3)))
    assert all(o.lag == o.sent for o in outcomes)
