from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tidewheel.server.model_control import reload


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.fails = False

    def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        self.calls.append(("unload", request.model_name))
        return pb.RepositoryModelUnloadResponse()

    def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        self.calls.append(("load", request.model_name))
        if self.fails:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such folder")
        return pb.RepositoryModelLoadResponse()


@pytest.fixture
def served() -> Iterator[tuple[Triton, str]]:
    triton, server = Triton(), grpc.server(futures.ThreadPoolExecutor(1))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield triton, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_reload(served: tuple[Triton, str]) -> None:
    triton, authority = served
    reload(authority, "b c")
    assert triton.calls == [("unload", "b c"), ("load", "b c")]
    triton.fails = True
    with pytest.raises(OSError, match="INVALID_ARGUMENT: no such folder"):
        reload(authority, "b c")


def test_reload_without_a_server() -> None:
    with pytest.raises(OSError, match="UNAVAILABLE"):
        reload("127.0.0.1:9", "a")
