"""Questions to tritonserver over HTTP, answered by a server of the test."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from tidewheel.server.endpoints import DeployedModel, TritonHttp


class Handler(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, tuple[int, object]]] = {}

    def do_GET(self) -> None:
        status, body = self.answers.get(f"{self.command} {self.path}", (404, {"error": "no"}))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def triton() -> Iterator[TritonHttp]:
    Handler.answers.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield TritonHttp(f"127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


def test_ready(triton: TritonHttp) -> None:
    assert not triton.is_ready()
    Handler.answers["GET /v2/health/ready"] = (400, {})
    assert not triton.is_ready()
    Handler.answers["GET /v2/health/ready"] = (200, {})
    assert triton.is_ready()
    assert not TritonHttp("127.0.0.1:9").is_ready()


def test_models(triton: TritonHttp) -> None:
    index = [
        {"name": "b c", "state": "READY"},
        {"name": "gone", "state": "UNAVAILABLE"},
        {"name": "a", "state": "READY"},
    ]
    twin = {"backend": "tidewheel", "parameters": {"engine_of": {"string_value": "a"}}}
    Handler.answers.update(
        {
            "POST /v2/repository/index": (200, index),
            "GET /v2/models/a/config": (
                200,
                {"backend": "tidewheel", "model_transaction_policy": {"decoupled": True}},
            ),
            "GET /v2/models/b%20c/config": (200, twin),
        }
    )
    assert triton.models() == [
        DeployedModel("a", "tidewheel", decoupled=True, engine_of=""),
        DeployedModel("b c", "tidewheel", decoupled=False, engine_of="a"),
    ]


def test_an_answer_that_is_none(triton: TritonHttp) -> None:
    with pytest.raises(OSError, match="404"):
        triton.models()
