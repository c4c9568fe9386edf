"""Those who operate a server list and cancel requests of all its front ends, with no word of their text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.engine.engine_clients import Client, endless, request
from support.triton.serving import wait_for
from tidewheel.config import EngineConfig
from tidewheel.engine.connection import ask
from tidewheel.engine.messages import (
    MAX_LISTED,
    CancelReply,
    CancelRequest,
    ListRequests,
    RequestList,
    RequestRow,
    encoder,
    to_engine_decoder,
)

Connect = Callable[..., Client]


def listed(folder: Path, limit: int = MAX_LISTED) -> RequestList:
    found = ask(folder, ListRequests(limit), RequestList)
    assert found is not None
    return found


def cancel(folder: Path, pid: int, number: int) -> bool:
    reply = ask(folder, CancelRequest(pid, number), CancelReply)
    assert reply is not None
    return reply.was_there


def rows(folder: Path) -> dict[str, RequestRow]:
    return {row.request_id: row for row in listed(folder).rows}


def test_requests_of_all_front_ends_are_listed(connect: Connect, folder: Path) -> None:
    one, other = connect(), connect()
    one.add(endless(1, request_id="first", tenant="acme", priority=1))
    one.recorder.wait_started(1)
    other.add(endless(1, n=3, request_id="second"))
    other.recorder.wait_started(1, (1, 1), (1, 2))
    wait_for(lambda: all(row.state == "running" for row in listed(folder).rows), 60, "rows")
    assert listed(folder).num_sequences == 4
    first, second = listed(folder).rows
    assert (first.request_id, first.tenant, first.priority, first.num_sequences) == ("first", "acme", "critical", 1)
    assert (second.request_id, second.tenant, second.priority, second.num_sequences) == ("second", "", "normal", 3)
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (3, 3)
    assert first.num_output_tokens >= 1 and second.num_output_tokens >= 3
    assert first.first_token_s is not None
    assert 0 <= first.waited_s <= first.first_token_s <= first.age_s


def test_waiting_requests_are_listed_and_cancelled(connect: Connect, folder: Path) -> None:
    client = connect(config=EngineConfig(model="ok", max_num_seqs=1))
    client.add(endless(1, request_id="runs"))
    client.recorder.wait_started(1)
    client.add(endless(2, request_id="waits"))
    wait_for(lambda: "waits" in rows(folder), 60, "second request")
    waiting = rows(folder)["waits"]
    assert (waiting.state, waiting.num_output_tokens, waiting.first_token_s) == ("waiting", 0, None)
    assert waiting.waited_s == waiting.age_s
    assert cancel(folder, listed(folder).pid, waiting.number)
    client.recorder.wait_ended(2)
    assert client.recorder.endings == {2: "cancelled"}
    assert rows(folder).keys() == {"runs"}


def test_one_request_is_cancelled_with_all_its_sequences(connect: Connect, folder: Path) -> None:
    one, other = connect(), connect()
    one.add(endless(1, request_id="stays"))
    other.add(endless(1, n=2, request_id="goes"))
    one.recorder.wait_started(1)
    other.recorder.wait_started(1, (1, 1))
    pid, number = listed(folder).pid, rows(folder)["goes"].number
    assert cancel(folder, pid, number)
    other.recorder.wait_ended(1, (1, 1))
    assert set(other.recorder.endings.values()) == {"cancelled"}
    assert not cancel(folder, pid, number)
    assert one.recorder.endings == {}
    assert rows(folder).keys() == {"stays"}


def test_the_oldest_are_listed(connect: Connect, folder: Path) -> None:
    client = connect()
    for key in range(1, 5):
        client.add(endless(key, n=2, request_id=str(key)))
        client.recorder.wait_started(key)
    found = listed(folder, 2)
    assert [row.request_id for row in found.rows] == ["1", "2"]
    assert [row.num_sequences for row in found.rows] == [2, 2]
    assert found.num_sequences == 8


def test_an_engine_that_counts_anew_cancels_nothing(connect: Connect, folder: Path) -> None:
    """A number of an engine that has died would name another request."""
    client = connect()
    client.add(endless(1))
    client.recorder.wait_started(1)
    found = listed(folder)
    assert not cancel(folder, found.pid + 1, found.rows[0].number)
    client.add(request(2, 5))
    client.recorder.wait_ended(2)
    assert 1 not in client.recorder.endings


def test_without_an_engine_there_is_no_answer(folder: Path) -> None:
    assert ask(folder, ListRequests(1), RequestList) is None


@pytest.mark.parametrize("limit", [0, -1, MAX_LISTED + 1])
def test_a_list_is_bounded(limit: int) -> None:
    with pytest.raises(Exception, match="Expected `int`"):
        to_engine_decoder.decode(encoder.encode(ListRequests(limit)))
