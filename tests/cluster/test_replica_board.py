"""What Ray's router and the gateway tell each other: replicas, tickets, and loads."""

from __future__ import annotations

import contextlib
import threading

from tidewheel.cluster.replica_board import REPORT_AGE_S, ReplicaBoard, board_of
from tidewheel.fleet.router import RouteRequest

NONE: frozenset[str] = frozenset()


def metadata(*names: str) -> dict[str, dict[str, str]]:
    return {name: {"grpc": f"{name}:1", "metrics": f"{name}:2", "health": f"{name}:3", "http": ""} for name in names}


def test_requests_are_spread_and_end_with_their_tickets() -> None:
    board = ReplicaBoard("least-loaded")
    board.update(metadata("a", "b"))
    route = RouteRequest()
    with board.ticket(route, lambda: NONE) as first, board.ticket(route, lambda: NONE) as second:
        assert {board.place(first.number), board.place(second.number)} == {"a", "b"}
        with board.ticket(route, lambda: {"a:1"}) as third:
            assert [board.place(third.number) for _ in range(3)] == ["b"] * 3, "a second choice replaces the first"
        assert first.flight is not None
        board.started(first.flight)
    for _ in range(2):
        with board.ticket(route, lambda: NONE) as one, board.ticket(route, lambda: NONE) as other:
            assert {board.place(one.number), board.place(other.number)} == {"a", "b"}, "nothing is counted twice"


def test_what_is_unfit_or_gone_is_not_chosen() -> None:
    board = ReplicaBoard("prefix-aware")
    unfit = {"a:1"}
    with board.ticket(RouteRequest(session="s"), lambda: unfit) as ticket:
        assert board.place(ticket.number) is None, "there is no replica"
        board.update(metadata("a"))
        assert board.place(ticket.number) is None
        unfit.clear()
        assert board.place(ticket.number) == "a"
        board.drop("a")
        assert board.place(ticket.number) is None
        board.update(metadata("a", "b"))
        assert board.place(ticket.number) in ("a", "b")
        number = ticket.number
    assert board.place(number) is None, "the request was given up"


def test_the_gateway_chooses_too() -> None:
    board = ReplicaBoard("round-robin")
    with board.ticket(RouteRequest(), lambda: NONE) as ticket:
        assert board.choose(ticket) is None, "there is no replica"
        board.update(metadata("a", "b"))
        assert board.choose(ticket) in ("a", "b")
        assert ticket.flight is not None
        assert board.knows(ticket.number)
    assert not board.knows(ticket.number)


def test_a_replica_is_asked_for_by_its_id() -> None:
    board = ReplicaBoard("least-loaded")
    board.update(metadata("a", "b"))
    assert board.place("b") == "b"
    assert board.knows("b")
    board.drop("b")
    assert board.place("b") is None
    assert not board.knows("b")
    with board.ticket(RouteRequest(), lambda: NONE) as ticket:
        assert board.choose(ticket) == "a"


def test_a_replica_without_ports_is_not_there_yet() -> None:
    board = ReplicaBoard("least-loaded")
    board.update({**metadata("a"), "b": {}})
    assert list(board.addresses) == ["a"]


def test_changes_are_told() -> None:
    board, told = ReplicaBoard("least-loaded"), threading.Event()
    board.on_change = told.set
    board.update(metadata("a"))
    assert told.is_set()


def test_reported_loads_count() -> None:
    board = ReplicaBoard("least-loaded")
    board.update(metadata("a", "b"))
    board.report("a", {"running": 5, "waiting": 0})
    assert board.figures == {"a:1": {"running": 5, "waiting": 0}, "b:1": {}}
    board.report("gone", {"running": 5, "waiting": 0})
    for _ in range(3):
        with board.ticket(RouteRequest(), lambda: NONE) as ticket:
            assert board.place(ticket.number) == "b"


def test_own_requests_are_not_those_of_others_once_they_end() -> None:
    """A report is some seconds old: it tells of requests that have ended meanwhile."""
    now = 100.0
    board = ReplicaBoard("least-loaded", lambda: now)
    board.update(metadata("a", "b"))
    with contextlib.ExitStack() as stack:
        tickets = [stack.enter_context(board.ticket(RouteRequest(), lambda: NONE)) for _ in range(8)]
        assert sorted(str(board.choose(one)) for one in tickets) == ["a"] * 4 + ["b"] * 4
    now += REPORT_AGE_S - 1
    board.report("a", {"running": 4, "waiting": 0})
    with contextlib.ExitStack() as stack:
        tickets = [stack.enter_context(board.ticket(RouteRequest(), lambda: NONE)) for _ in range(8)]
        assert sorted(str(board.choose(one)) for one in tickets) == ["a"] * 4 + ["b"] * 4
    now += 3 * REPORT_AGE_S
    board.report("a", {"running": 4, "waiting": 0})
    with contextlib.ExitStack() as stack:
        tickets = [stack.enter_context(board.ticket(RouteRequest(), lambda: NONE)) for _ in range(4)]
        assert [board.choose(one) for one in tickets] == ["b"] * 4, "others have sent them"


def test_a_board_is_found_by_its_name() -> None:
    assert board_of("one", "least-loaded") is board_of("one", "round-robin")
    assert board_of("other", "least-loaded") is not board_of("one", "least-loaded")
