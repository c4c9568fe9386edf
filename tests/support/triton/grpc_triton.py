"""A Triton without models: the gRPC service in this process, with answers that a test scripts."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

Answer = Iterator[pb.ModelStreamInferResponse]
_PAINTER = (("label",), ("image", "step", "steps", "finish_reason", "png"))  # inputs and outputs
_ENCODERS = {
    "embedder": (("text",), ("embedding", "num_input_tokens")),
    "reranker": (("query", "text"), ("score", "num_input_tokens")),
    "classifier": (("text",), ("scores", "label", "num_input_tokens")),
}
_OF_TEXT_MODEL = (("text_input", "messages", "sampling_parameters"), ("text_output",))


@dataclass(frozen=True)
class Asked:
    """A request as the server read it."""

    message: pb.ModelInferRequest
    metadata: dict[str, str]

    @property
    def inputs(self) -> dict[str, Any]:
        pairs = zip(self.message.inputs, self.message.raw_input_contents, strict=True)
        return {tensor.name: self._value(tensor.datatype, raw) for tensor, raw in pairs}

    @property
    def sampling(self) -> dict[str, Any]:
        return json.loads(self.inputs.get("sampling_parameters", "{}"))

    @staticmethod
    def _value(datatype: str, raw: bytes) -> Any:
        if datatype == "BYTES":
            return raw[4:].decode("utf-8", "surrogatepass")
        if datatype == "BOOL":
            return raw == b"\x01"
        return list(struct.unpack(f"<{len(raw) // 4}i", raw))


def response(request: pb.ModelInferRequest, **outputs: Any) -> pb.ModelStreamInferResponse:
    """Make a response; keywords name outputs: str or list of str, or (datatype, format, values) for numbers."""
    answer = pb.ModelStreamInferResponse()
    infer = answer.infer_response
    infer.model_name, infer.id = request.model_name, request.id
    for name, value in outputs.items():
        tensor = infer.outputs.add()
        tensor.name = name
        if isinstance(value, str | list):
            texts = [text.encode() for text in ([value] if isinstance(value, str) else value)]
            tensor.datatype, raw = "BYTES", b"".join(struct.pack("<I", len(text)) + text for text in texts)
        else:
            tensor.datatype, code, numbers = value
            raw = struct.pack(f"<{len(numbers)}{code}", *numbers)
        infer.raw_output_contents.append(raw)
    return answer


@dataclass
class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A server; `answer(asked)` yields the responses of a request, by default its words one by one."""

    answer: Callable[[Asked], Answer] | None = None
    ready: bool = True
    models: tuple[str, ...] = ("zebra", "demo", "demo_infer")
    asked: list[Asked] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    loras: dict[str, dict[str, str]] = field(default_factory=dict)  # folder of each adapter by model
    lora_orders: list[dict[str, Any]] = field(default_factory=list)
    refused_path: str = ""  # of which no adapter can be loaded

    def refuse_and_listen(self, text: str) -> list[bool]:
        """Answer with an error, and end the stream later. The list then says whether the client cancelled it."""
        was_cancelled: list[bool] = []

        def answer(_: Asked) -> Answer:
            self.ended.clear()
            yield pb.ModelStreamInferResponse(error_message=text)
            was_cancelled.append(self.ended.wait(0.2))

        self.answer = answer
        return was_cancelled

    def ModelStreamInfer(self, requests: Iterator[pb.ModelInferRequest], context: Any) -> Answer:
        for message in requests:
            asked = Asked(message, dict(context.invocation_metadata()))
            if any(b'"lora_order"' in raw for raw in message.raw_input_contents):
                yield self._obey(asked)
                continue
            context.add_callback(self.ended.set)
            answer = self.answer or say_words  # before the request is seen, and another is set for the next
            self.asked.append(asked)
            try:
                yield from answer(asked)
            except Refused as error:
                context.abort(error.code, error.text)

    def _obey(self, asked: Asked) -> pb.ModelStreamInferResponse:
        """Execute an order about adapters, as the backend does."""
        self.lora_orders.append(order := asked.sampling | {"model": asked.message.model_name})
        known, name = self.loras.setdefault(order["model"], {}), order.get("lora_name", "")
        if order["lora_order"] == "list":
            unread = {"rank": None, "is_loaded": False, "error": ""}
            rows = [{"name": one, "path": path, **unread} for one, path in known.items()]
            return response(asked.message, text_output=json.dumps(rows), finish_reason="stop")
        if order["lora_order"] == "unload" and known.pop(name, None) is None:
            return pb.ModelStreamInferResponse(error_message=f"[TW-NOT-FOUND] there is no adapter {name!r}")
        if order["lora_order"] == "load":
            if not order["lora_path"]:
                return pb.ModelStreamInferResponse(error_message="[TW-INPUT] lora_path is not set")
            if order["lora_path"] == self.refused_path:
                return pb.ModelStreamInferResponse(error_message="[TW-INPUT] lora_path is outside of lora_dir")
            known[name] = order["lora_path"]
        return response(asked.message, text_output="", finish_reason="stop")

    def ModelInfer(self, message: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        context.add_callback(self.ended.set)
        asked, answer = Asked(message, dict(context.invocation_metadata())), self.answer or say_words
        self.asked.append(asked)
        try:
            return next(answer(asked)).infer_response
        except Refused as error:
            context.abort(error.code, error.text)

    def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self.ready)

    def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self.ready)

    def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="triton", version="2.51.0")

    def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        answer = pb.ModelMetadataResponse(name=request.name, versions=["1"], platform="tidewheel")
        answer.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        answer.outputs.add(name="text_output", datatype="BYTES", shape=[-1])
        return answer

    def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Any) -> pb.RepositoryIndexResponse:
        answer = pb.RepositoryIndexResponse()
        for name in self.models:
            answer.models.add(name=name, version="1", state="READY")
        return answer

    def ModelConfig(self, request: pb.ModelConfigRequest, context: Any) -> pb.ModelConfigResponse:
        answer = pb.ModelConfigResponse()
        answer.config.name = request.name
        config = answer.config
        config.model_transaction_policy.decoupled = not request.name.endswith(("_infer", *_ENCODERS))
        for tensors, names in zip(
            (config.input, config.output),
            {**_ENCODERS, "painter": _PAINTER}.get(request.name, _OF_TEXT_MODEL),
            strict=True,
        ):
            for name in names:
                tensors.add(name=name)
        return answer


@contextmanager
def running(fake: FakeTriton, address: str = "127.0.0.1:0") -> Iterator[FakeTriton]:
    """Serve on the loopback, by default on a free port, `fake.port`."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=40))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    fake.port = server.add_insecure_port(address)
    server.start()
    yield fake
    server.stop(grace=None).wait()


class Refused(Exception):
    """Error that an answer raises to end the call with a gRPC status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


def paint(asked: Asked, *steps: int, of: int = 20, reason: str = "stop") -> Answer:
    """Yield a picture after each of the steps: previews, and the last one. Its size is 2 x 1, its value the step."""
    for step in steps or (of,):
        is_file = asked.message.parameters["format"].string_param == "png_base64"
        picture = {"png": f"PNG {step}"} if is_file else {"image": ("UINT8", "B", [step, 0])}
        answer = response(
            asked.message,
            **picture,
            step=("INT32", "i", [step]),
            steps=("INT32", "i", [of]),
            finish_reason=reason if step == (steps or (of,))[-1] else "None",
        )
        if not is_file:
            answer.infer_response.outputs[0].shape.extend([2, 1, 1])
        yield answer


def parameters(asked: Asked) -> dict[str, str]:
    """Return the parameters that are texts and not empty."""
    given = asked.message.parameters
    return {name: given[name].string_param for name in given if given[name].string_param}


def say_words(asked: Asked) -> Answer:
    words = asked.inputs["text_input"].split()
    for index, word in enumerate(words):
        last = index == len(words) - 1
        yield response(
            asked.message,
            text_output=word + ("" if last else " "),
            finish_reason="stop" if last else "None",
            num_input_tokens=("UINT32", "I", [7]),
            num_output_tokens=("UINT32", "I", [1]),
        )
