"""A gateway, and the Triton without models behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.gateway.running_gateway import RunningGateway, gateway_to
from support.triton.grpc_triton import FakeTriton, running
from tidewheel.gateway import upstream


@pytest.fixture(scope="session", autouse=True)
def patient() -> Iterator[None]:
    """Give a server more time to answer a look: a busy machine is no dead server."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(upstream, "PROBE_S", 60.0)
        yield


@pytest.fixture(scope="session")
def served() -> Iterator[tuple[FakeTriton, RunningGateway]]:
    with running(FakeTriton(models=("demo", "demo_infer"))) as fake, gateway_to(fake.port) as gateway:
        yield fake, gateway


@pytest.fixture
def triton(served: tuple[FakeTriton, RunningGateway]) -> FakeTriton:
    fake, _ = served
    fake.answer = None
    fake.asked.clear()
    fake.ended.clear()
    return fake


@pytest.fixture
def gateway(served: tuple[FakeTriton, RunningGateway], triton: FakeTriton) -> RunningGateway:
    return served[1]
