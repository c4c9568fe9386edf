"""A client, and the Triton without models that it talks to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.triton.grpc_triton import FakeTriton, running
from tidewheel_client import Client


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with running(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def client(triton: FakeTriton) -> Iterator[Client]:
    with Client(f"127.0.0.1:{triton.port}", timeout_s=30) as one:
        yield one
