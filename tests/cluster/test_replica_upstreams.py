"""The gateway in front of replicas, with a Ray that only keeps slots."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from support.gateway.running_gateway import RunningGateway, gateway_to, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, running
from support.triton.serving import wait_for
from tidewheel.cluster import replica_upstreams
from tidewheel.cluster.replica_board import ReplicaBoard
from tidewheel.cluster.replica_upstreams import ReplicaUpstreams

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'tidewheel[ray]'")
PATIENCE_S = 60.0
ALONE = "a"


class Ray:
    """Handle of replicas, as far as the gateway uses it."""

    def __init__(self, board: ReplicaBoard) -> None:
        self._board = board
        self.asked: list[int | str] = []
        self.kept: list[str] = []  # slots, by replica

    @asynccontextmanager
    async def choose_replica(self, asked: int | str) -> AsyncIterator[SimpleNamespace]:
        self.asked.append(asked)
        while (replica := self._board.place(asked)) is None:
            await asyncio.sleep(0.01)
        self.kept.append(replica)
        try:
            yield SimpleNamespace(replica_id=replica)
        finally:
            self.kept.remove(replica)


class Fleet:
    """Replicas that come and go, behind a gateway."""

    def __init__(self) -> None:
        self.board = ReplicaBoard("prefix-aware")
        self.ray = Ray(self.board)
        self.upstreams = ReplicaUpstreams(self.ray, self.board, PATIENCE_S, may_be_empty=True)
        self.upstreams._slots._linger_s = 1e6  # what goes does so for another reason

    def set(self, **tritons: FakeTriton) -> None:
        self.board.update({name: {"grpc": f"127.0.0.1:{one.port}"} for name, one in tritons.items()})

    @property
    def num_ready(self) -> int:
        return sum(not one.not_ready for one in self.upstreams.each)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def gateway(fleet: Fleet) -> Iterator[RunningGateway]:
    with gateway_to(upstreams=fleet.upstreams) as one:
        yield one


@pytest.fixture
def tritons() -> Iterator[tuple[FakeTriton, FakeTriton]]:
    with running(FakeTriton(answer=say)) as one, running(FakeTriton(answer=say)) as other:
        yield one, other


def test_requests_of_a_replica_ask_ray_once(
    fleet: Fleet, gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    fleet.set(a=tritons[0])
    wait_for(lambda: fleet.num_ready == 1, 30, "the replica")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: gateway.complete(), range(8)))
    assert [one.status_code for one in answers] == [200] * 8, [one.text for one in answers]
    assert fleet.ray.asked == [ALONE]
    assert fleet.ray.kept == [ALONE]
    fleet.set()
    wait_for(lambda: fleet.ray.kept == [], 30, "its slot, which nothing uses")


def test_a_replica_that_goes_is_kept_for_its_last_request(
    fleet: Fleet, gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    release = threading.Event()
    old, new = tritons

    def slowly(asked: Asked) -> Answer:
        yield from say(asked, finish_reason="None")
        release.wait(30)
        yield from say(asked)

    old.answer = slowly
    fleet.set(a=old)
    wait_for(lambda: fleet.num_ready == 1, 30, "the replica")
    with ThreadPoolExecutor(1) as pool:
        try:
            answer = pool.submit(gateway.complete, stream=True)
            wait_for(lambda: fleet.ray.kept == [ALONE], 30, "its slot")
            fleet.set(b=new)
            wait_for(lambda: fleet.num_ready == 1 and len(fleet.upstreams.each) == 1, 30, "the other replica")
            assert gateway.complete().ok
            assert len(new.asked) == 1, "none goes where a slot alone is left"
            assert ALONE in fleet.ray.kept
        finally:
            release.set()
        assert answer.result().text.endswith("data: [DONE]\n\n")
    wait_for(lambda: ALONE not in fleet.ray.kept, 30, "its slot given back")


def test_a_request_waits_for_the_first_replica(
    fleet: Fleet, gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    assert gateway.get("/health").ok, "having no replica is nothing wrong"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.complete)
        wait_for(lambda: len(fleet.ray.asked) == 1, 30, "Ray, which counts it")
        fleet.set(a=tritons[0])
        assert answer.result().ok


def test_no_more_wait_than_the_limit(
    fleet: Fleet,
    gateway: RunningGateway,
    tritons: tuple[FakeTriton, FakeTriton],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_upstreams, "MAX_HELD", 2)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(gateway.complete) for _ in range(2)]
        wait_for(lambda: len(fleet.ray.asked) == 2, 30, "two that wait")
        refused = gateway.complete()
        assert refused.status_code == 429
        assert "2 requests wait for one already" in refused.json()["error"]["message"]
        fleet.set(a=tritons[0])
        assert all(answer.result().ok for answer in answers)
    assert all(isinstance(one, int) for one in itertools.islice(fleet.ray.asked, 2))


def test_a_request_waits_while_the_only_replica_has_no_models(
    fleet: Fleet, gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    """A server that ends unloads its models first, and one that begins has none."""
    tritons[0].models = ()
    fleet.set(a=tritons[0])
    wait_for(lambda: fleet.num_ready == 1, 30, "the replica")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.complete)
        wait_for(lambda: len(fleet.ray.asked) == 1 or answer.done(), 30, "Ray, which counts it")
        tritons[0].models = ("demo",)
        assert answer.result().ok, answer.result().text
