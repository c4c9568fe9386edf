"""The gateway in front of replicas, with a Ray that only keeps calls waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace

import pytest

from support.gateway.running_gateway import RunningGateway, gateway_to, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, running
from support.triton.serving import wait_for
from tidewheel.cluster import replica_upstreams
from tidewheel.cluster.cluster_settings import ClusterSettings
from tidewheel.cluster.replica_upstreams import KnownReplica, ReplicaFeed, ReplicaUpstreams
from tidewheel.gateway.gateway_options import Address

PATIENCE_S = 60.0
SETTINGS = ClusterSettings(model="a/b", replicas=0, max_replicas=4, patience_s=PATIENCE_S)


class Call:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Ray:
    """Handle of replicas, as far as the gateway uses it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.wait_for_start = SimpleNamespace(remote=self._call)

    def _call(self) -> Call:
        self.calls.append(Call())
        return self.calls[-1]


class Fleet:
    """Replicas that come and go, behind a gateway."""

    def __init__(self) -> None:
        self.feed = ReplicaFeed()
        self.ray = Ray()
        self.upstreams = ReplicaUpstreams(self.ray, self.feed, SETTINGS)

    def set(self, **tritons: FakeTriton) -> None:
        self.feed.publish([KnownReplica(Address(f"127.0.0.1:{one.port}"), {}) for one in tritons.values()])

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


def test_a_replica_that_goes_ends_its_last_request(
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
            wait_for(lambda: len(old.asked) == 1, 30, "its request")
            fleet.set(b=new)
            wait_for(lambda: fleet.num_ready == 1 and len(fleet.upstreams.each) == 1, 30, "the other replica")
            assert gateway.complete().ok
            assert len(new.asked) == 1, "none goes to a replica that goes"
        finally:
            release.set()
        assert answer.result().text.endswith("data: [DONE]\n\n")
    assert fleet.ray.calls == []


def test_a_request_waits_for_the_first_replica(
    fleet: Fleet, gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    assert gateway.get("/health").ok, "having no replica is nothing wrong"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.complete)
        wait_for(lambda: len(fleet.ray.calls) == 1, 30, "Ray, which counts it")
        fleet.set(a=tritons[0])
        assert answer.result().ok
    assert fleet.ray.calls[0].is_cancelled


def test_no_more_wait_than_the_limit(
    fleet: Fleet,
    gateway: RunningGateway,
    tritons: tuple[FakeTriton, FakeTriton],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_upstreams, "MAX_HELD", 2)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(gateway.complete) for _ in range(2)]
        wait_for(lambda: len(fleet.ray.calls) == 2, 30, "two that wait")
        refused = gateway.complete()
        assert refused.status_code == 429
        assert "2 requests wait for one already" in refused.json()["error"]["message"]
        fleet.set(a=tritons[0])
        assert all(answer.result().ok for answer in answers)


def test_a_request_waits_while_the_only_replica_has_no_models(
    fleet: Fleet, gateway: RunningGateway, tritons: tuple[FakeTriton, FakeTriton]
) -> None:
    """A server that ends unloads its models first, and one that begins has none."""
    tritons[0].models = ()
    fleet.set(a=tritons[0])
    wait_for(lambda: fleet.num_ready == 1, 30, "the replica")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.complete)
        with pytest.raises(FutureTimeout):
            answer.result(1)
        tritons[0].models = ("demo",)
        assert answer.result().ok, answer.result().text
