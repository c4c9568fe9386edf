"""A near server, and a far one of a higher cost behind a slow link: which takes what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest
import requests

from support.gateway.running_gateway import RunningGateway, gateway_to, perf, say
from support.gateway.slow_link import slow_link
from support.triton.grpc_triton import Answer, Asked, FakeTriton, Refused, running
from support.triton.serving import wait_for
from tidewheel.cli.main import main
from tidewheel.gateway.gateway_options import Address

DELAY_S = 0.05  # one way
ROUND_TRIP_US = 100_000


def say_late(asked: Asked, waited_s: int = 60) -> Answer:
    """Report a long wait for a row, which has not passed here."""
    times = {name: ("INT64", "q", [value]) for name, value in (("arrival", 0), ("first_scheduled", waited_s * 10**9))}
    yield from say(asked, **perf(1) | {f"{name}_time_ns": value for name, value in times.items()})


def refuse(tag: str) -> Any:
    def answer(asked: Asked) -> Answer:
        raise Refused(grpc.StatusCode.UNAVAILABLE, f"[{tag}] no")
        yield

    return answer


@dataclass
class Pair:
    near: FakeTriton
    far: FakeTriton
    gateway: RunningGateway
    pool: ThreadPoolExecutor
    release: threading.Event = field(default_factory=threading.Event)

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.near.asked), len(self.far.asked)

    def where(self, **fields: Any) -> str:
        """Return the server that answers a request."""
        before = self.counts
        answer = self.gateway.complete(**fields)
        assert answer.ok, answer.text
        near, far = (now - then for now, then in zip(self.counts, before, strict=True))
        return "near" * near + "far" * far

    def hold_one_near(self, waited_s: int = 60) -> Future[requests.Response]:
        """Let the near server have no room: a request has waited there, a 16th of which counts, and one waits now."""

        def hold(asked: Asked) -> Answer:
            self.release.wait(60)
            yield from say(asked)

        self.near.answer = partial(say_late, waited_s=waited_s)
        assert self.where() == "near"
        self.near.answer, before = hold, self.counts
        held = self.pool.submit(self.gateway.complete)
        wait_for(lambda: self.counts[0] == before[0] + 1, 60, "the request that waits")
        self.near.answer = say
        return held

    def kill_near(self) -> None:
        self.near.ready = False
        wait_for(lambda: self.gateway.upstreams.each[0].not_ready, 60, "look")


@contextmanager
def pair_of(near: FakeTriton, far: FakeTriton) -> Iterator[Pair]:
    with slow_link(far.port, DELAY_S) as port, ThreadPoolExecutor(8) as pool:
        addresses = [Address.parse(f"127.0.0.1:{near.port}"), Address.parse(f"127.0.0.1:{port},cost=5")]
        with gateway_to(addresses=addresses) as gateway:
            pair = Pair(near, far, gateway, pool)
            try:
                yield pair
            finally:
                pair.release.set()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with running(FakeTriton(answer=say)) as near, running(FakeTriton(answer=say)) as far, pair_of(near, far) as both:
        yield both


def test_the_round_trip_of_a_server_is_measured(pair: Pair) -> None:
    near, far = (one.terms for one in pair.gateway.upstreams.each)
    assert near.round_trip_s > 0 and far.round_trip_s >= 2 * DELAY_S


def test_the_near_server_takes_all_while_it_has_room(pair: Pair) -> None:
    assert [pair.where(stream=number % 2 == 0) for number in range(6)] == ["near"] * 6
    text = pair.gateway.get("/metrics").text
    sent = {one.address.grpc: one.num_sent for one in pair.gateway.upstreams.each}
    assert sorted(sent.values()) == [0, 6]
    for authority, count in sent.items():
        assert f'tidewheel_gateway_upstream_requests_total{{upstream="{authority}"}} {count}' in text


def test_the_far_server_takes_what_would_wait_and_the_near_one_what_comes_then(pair: Pair) -> None:
    held = pair.hold_one_near()
    assert [pair.where() for _ in range(3)] == ["far"] * 3
    assert pair.where(priority=1) == "near", "what waits is of a lower class"
    assert pair.where(priority=4) == "near", "LOW requests wait"
    pair.release.set()
    assert held.result().ok
    assert [pair.where() for _ in range(3)] == ["near"] * 3


def test_where_streams_get_no_first_token_there_is_no_room(pair: Pair) -> None:
    def hold(asked: Asked) -> Answer:
        pair.release.wait(60)
        yield from say(asked)

    pair.near.answer = hold
    streams = [pair.pool.submit(pair.gateway.complete, stream=True, priority=1) for _ in range(4)]
    wait_for(lambda: sum(pair.counts) == 4, 60, "streams, of which a slow machine may send some far already")
    pair.near.answer = say
    wait_for(lambda: pair.where(priority=1) == "far", 60, "the far server, once they are late")
    pair.release.set()
    assert all(stream.result().ok for stream in streams)
    assert pair.where(priority=1) == "near"


def test_a_deadline_that_the_way_would_break_is_not_sent_far(pair: Pair) -> None:
    pair.hold_one_near()
    assert pair.where(deadline_ms=60_000) == "far"
    assert pair.far.asked[-1].message.parameters["timeout"].int64_param <= 60_000_000 - ROUND_TRIP_US
    before = pair.counts
    pair.gateway.complete(deadline_ms=ROUND_TRIP_US // 1000)
    assert pair.counts == (before[0] + 1, before[1])


@pytest.mark.parametrize(
    "fields", [{"ttft_ms": 1700}, {"metadata": {"ttft_ms": "1700"}}, {"headers": {"x-slo-ttft-ms": "1700"}}]
)
def test_a_first_token_that_the_far_server_can_give_in_time_is_not_waited_for_near(
    pair: Pair, fields: dict[str, Any]
) -> None:
    pair.hold_one_near(waited_s=7)  # there is room for the class, up to 0.5 s
    assert pair.where(**fields) == "far"
    assert pair.where(**fields, priority=4) == "near"
    assert pair.where(ttft_ms=ROUND_TRIP_US // 2000) == "near", "nobody can"
    assert pair.where() == "near"
    bad = pair.gateway.complete(ttft_ms=[300])
    assert bad.ok and pair.near.asked[-1].sampling["ttft_ms"] == [300], "the server refuses it"


@pytest.mark.parametrize(
    ("fields", "is_overflow"), [({}, True), ({"priority": 4}, False), ({"deadline_ms": 90}, False)]
)
def test_what_the_near_server_refuses(pair: Pair, fields: dict[str, Any], is_overflow: bool) -> None:
    pair.near.answer = refuse("TW-BUSY retry_after_ms=10")
    answer = pair.gateway.complete(**fields)
    assert pair.counts == (1, int(is_overflow))
    assert answer.status_code == (200 if is_overflow else 429)


@pytest.mark.parametrize("fields", [{}, {"priority": 4}, {"session_id": "chat"}, {"stream": True}])
def test_the_far_server_takes_everything_when_the_near_one_is_gone(pair: Pair, fields: dict[str, Any]) -> None:
    pair.near.answer = refuse("TW-DRAINING")
    assert pair.where(**fields) == "nearfar"
    pair.kill_near()
    assert pair.where(**fields) == "far"
    pair.near.ready, pair.near.answer = True, say
    wait_for(lambda: not pair.gateway.upstreams.each[0].not_ready, 60, "look")
    assert pair.where(**fields) == "near"


def test_a_session_that_overflowed_stays_until_nothing_waits_near(pair: Pair) -> None:
    held = pair.hold_one_near()
    assert pair.where(session_id="chat") == "far"
    assert pair.where(session_id="chat") == "far"
    pair.release.set()
    assert held.result().ok
    assert pair.where(session_id="chat") == "near"


def test_an_unreachable_far_server_changes_nothing(pair: Pair) -> None:
    pair.far.ready = False
    wait_for(lambda: pair.gateway.upstreams.each[1].not_ready, 60, "look")
    pair.hold_one_near()
    assert pair.where() == "near"
    pair.near.answer = refuse("TW-BUSY retry_after_ms=10")
    answer = pair.gateway.complete()
    assert (answer.status_code, answer.json()["error"]["tag"]) == (429, "TW-BUSY")
    pair.kill_near()
    assert pair.gateway.complete().status_code == 503
    assert pair.counts[1] == 0


def test_a_server_in_two_forms_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--url", "a:1", "--url", "b:1", "--url", "a:1,cost=1"]) == 2
    assert "--url a:1 is given in 2 forms: name each server once" in capsys.readouterr().err
