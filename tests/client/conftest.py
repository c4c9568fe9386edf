"""A client, and the Triton without models that it talks to."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from support.grpc_triton import FakeTriton
from tidewheel_client import Client


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    fake = FakeTriton()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=40))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    fake.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield fake
    server.stop(grace=None).wait()


@pytest.fixture
def client(triton: FakeTriton) -> Iterator[Client]:
    with Client(f"127.0.0.1:{triton.port}", timeout_s=30) as running:
        yield running
