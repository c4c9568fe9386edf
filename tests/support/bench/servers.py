"""Servers without models for the benchmark: gRPC with declared tensors, HTTP with answers by a script."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from support.triton.grpc_triton import Answer, Asked, FakeTriton, response

OURS = ("input_ids", "text_input", "stream", "sampling_parameters", "return_num_output_tokens", "return_token_ids")
BASELINE = ("input_ids", "max_tokens", "ignore_eos")
VLLM = ("text_input", "stream", "sampling_parameters")


def count_up(asked: Asked) -> Answer:
    """Answer with as many tokens as were asked for: the first alone, the rest together."""
    wanted = asked.sampling["max_tokens"]
    for count in (1, wanted - 1):
        yield response(
            asked.message,
            text_output="x" * count,
            finish_reason="length" if count != 1 else "None",
            num_output_tokens=("UINT32", "I", [count]),
            token_ids=("INT32", "i", [9] * count),
        )


class BenchTriton(FakeTriton):
    """A gRPC server with `inputs` by model; a baseline, a classifier and `…_infer` answer once."""

    inputs: ClassVar[dict[str, tuple[str, ...]]] = {
        "demo": OURS,
        "demo_infer": OURS,
        "baseline": BASELINE,
        "vllm": VLLM,
        "classifier": ("pixels",),
        "pictures": ("pixels",),
    }
    infer_error: tuple[grpc.StatusCode, str] | None = None

    def ModelConfig(self, request: pb.ModelConfigRequest, context: Any) -> pb.ModelConfigResponse:
        if request.name not in self.inputs:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        answer = pb.ModelConfigResponse()
        answer.config.name = request.name
        is_baseline = request.name == "baseline"
        answer.config.max_batch_size = 8 if is_baseline else 0
        answers_once = request.name in ("baseline", "classifier") or request.name.endswith("_infer")
        answer.config.model_transaction_policy.decoupled = not answers_once
        for name in self.inputs[request.name]:
            answer.config.input.add(name=name)
        return answer

    def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> Any:
        asked = Asked(request, {})
        self.asked.append(asked)
        if self.infer_error is not None:
            context.abort(*self.infer_error)
        inputs = asked.inputs
        wanted = inputs["max_tokens"][0] if "max_tokens" in inputs else asked.sampling.get("max_tokens", 1)
        return response(request, num_output_tokens=("UINT32", "I", [wanted]), text_output="x" * wanted).infer_response


@contextmanager
def bench_triton(answer: Callable[[Asked], Answer] | None = count_up) -> Iterator[BenchTriton]:
    fake = BenchTriton(answer=answer)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=40))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    fake.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield fake
    finally:
        server.stop(grace=None).wait()


def shapes(asked: Asked) -> dict[str, list[int]]:
    return {tensor.name: list(tensor.shape) for tensor in asked.message.inputs}


def ids(asked: Asked) -> list[int]:
    position = [tensor.name for tensor in asked.message.inputs].index("input_ids")
    raw = asked.message.raw_input_contents[position]
    return list(struct.unpack(f"<{len(raw) // 4}i", raw))


class Scripted:
    """An HTTP server: `get` and `post` map a path to (status, body), or for streams to a list of events."""

    def __init__(self) -> None:
        self.get: dict[str, tuple[int, Any]] = {}
        self.post: dict[str, tuple[int, Any]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def scripted_http() -> Iterator[Scripted]:
    script = Scripted()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*script.get.get(self.path, (404, {"error": "no such path"})))

        def do_POST(self) -> None:
            script.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if self.headers["Content-Type"] != "application/json":  # as vLLM's server has it
                self._answer(400, {"error": "Unsupported Media Type"})
                return
            self._answer(*script.post.get(self.path, (404, {"error": "no such path"})))

        def _answer(self, status: int, body: Any) -> None:
            data = "".join(f"data: {event}\n\n" for event in body) if isinstance(body, list) else json.dumps(body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
