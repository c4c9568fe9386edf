"""Readers of streams, against servers that send what is known."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from common.stream_readers import Asked, GrpcReader, HttpReader, Received
from path.stream_path import Case, row_of

EVENT = b'data: {"model_name":"m","text_output":"%s"}\n\n'


def test_a_row_has_the_promised_shape() -> None:
    cpu = {"engine": 1.0, "front_end": 2.0, "server": 3.0, "client": 4.0}
    row = row_of(Case(2, "grpc", 10.0, "given"), Received(5.0, 1000, [20.0] * 100), cpu)
    assert row["streams"] == 2 and row["tokens_per_s"] == 200 and row["tokens_per_response"] == 10.0
    assert row["gap_ms"] == {"p50": 20.0, "p99": 20.0}
    assert row["cpu_us_per_token"] == {"engine": 1000.0, "front_end": 2000.0, "server": 3000.0, "client": 4000.0}
    assert row["of_device"] == 1.0


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def ModelStreamInfer(self, requests: Iterator[service_pb2.ModelInferRequest], _: object) -> Iterator[object]:
        for request in requests:
            self.texts.append(request.raw_input_contents[0])
        for number in (1, 2, 3):
            response = service_pb2.ModelInferResponse(model_name="m", raw_output_contents=[b" t9" * number])
            yield service_pb2.ModelStreamInferResponse(infer_response=response)


@pytest.fixture
def grpc_port() -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None)


def test_grpc_responses_are_counted_by_stream_and_streams_begin_again(grpc_port: int) -> None:
    reader = GrpcReader(Asked(f"127.0.0.1:{grpc_port}", "m", 6), 2)
    reader.socket.settimeout(30)
    tokens: dict[int, list[int]] = {}
    while len([1 for counts in tokens.values() if len(counts) == 3]) < 4:
        for stream, count in reader.read():
            tokens.setdefault(stream, []).append(count)
    assert all(counts == [1, 2, 3][: len(counts)] for counts in tokens.values())
    reader.socket.close()


def test_events_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = HttpReader(Asked(f"127.0.0.1:{listener.getsockname()[1]}", "m", 6))
        server, _ = listener.accept()
        threading.Thread(target=lambda: server.sendall(EVENT % b" t9 t8" + EVENT % b" t7")).start()
        assert [count for _, count in reader.read()] == [2, 1]
        server.close()
        reader.socket.close()
