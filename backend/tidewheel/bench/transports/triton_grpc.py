import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tidewheel.bench import BenchError
from tidewheel.bench.outcome import OfferedRequest, RequestFailed, RequestOutcome
from tidewheel.bench.transports.declared_inputs import DeclaredInputs
from tidewheel.bench.transports.tensors import OneShotModel, tensor_request, with_class

NUM_CHANNELS = 4
PROBE_S = 5.0
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)


class TritonGrpcTransport:
    """Transport over gRPC: a stream per decoupled request, else unary calls.

    `with_ids`: ask for token ids. `beside`: one-shot models by the entry that requests name.
    """

    can_cancel = True

    def __init__(
        self, address: str, model: str, *, with_ids: bool = False, beside: Mapping[str, OneShotModel] | None = None
    ) -> None:
        self._address = address
        self._model = model
        self._with_ids = with_ids
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[Any] = []
        self._sent = 0
        self._shape: DeclaredInputs | None = None
        self._beside = beside or {}
        self._tensor_requests: dict[str, pb.ModelInferRequest] = {}  # by entry
        self._decoupled: set[str] = set()  # models beside that stream

    async def open(self) -> None:
        self._channels = [grpc.aio.insecure_channel(self._address, options=_OPTIONS) for _ in range(NUM_CHANNELS)]
        self._stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        try:
            await self._look()
        except BaseException:
            await self.close()
            raise

    async def send(self, offered: OfferedRequest, input_ids: Sequence[int], outcome: RequestOutcome) -> None:
        shape = self._shape
        assert shape is not None
        self._sent += 1
        stub = self._stubs[self._sent % NUM_CHANNELS]
        if offered.entry:
            await self._send_tensors(stub, offered, outcome)
            return
        message = pb.ModelInferRequest(model_name=self._model)
        for name, datatype, values in shape.tensors(offered, input_ids, with_ids=self._with_ids):
            message.inputs.add(name=name, datatype=datatype, shape=shape.sizes(values))
            message.raw_input_contents.append(_packed(datatype, values))
        outcome.streamed = shape.is_decoupled
        try:
            if shape.is_decoupled:
                await self._stream(stub, message, shape, outcome)
            else:
                note_response(shape, await stub.ModelInfer(message), outcome)
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error.code().name, str(error.details())) from None

    async def _send_tensors(self, stub: Any, offered: OfferedRequest, outcome: RequestOutcome) -> None:
        outcome.streamed = False
        message = with_class(self._tensor_requests[offered.entry], offered.parameters)
        try:
            if message.model_name in self._decoupled:
                async for _ in _answers(stub, message):
                    pass
            else:
                await stub.ModelInfer(message)
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error.code().name, str(error.details())) from None
        outcome.add_tokens(offered.num_output_tokens)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        self._channels, self._stubs = [], []

    async def _look(self) -> None:
        config = await self._config(self._model)
        inputs, policy = (tensor.name for tensor in config.input), config.model_transaction_policy
        self._shape = DeclaredInputs.of(self._model, inputs, config.max_batch_size, is_decoupled=policy.decoupled)
        for entry, model in self._beside.items():
            config = await self._config(model.served_name)
            self._tensor_requests[entry] = tensor_request(model, config)
            self._decoupled |= {model.served_name} if config.model_transaction_policy.decoupled else set()

    async def _config(self, model: str) -> Any:
        stub = self._stubs[0]
        where = f"model {model!r} at {self._address}"
        try:
            ready = await stub.ModelReady(pb.ModelReadyRequest(name=model), timeout=PROBE_S)
            config = await stub.ModelConfig(pb.ModelConfigRequest(name=model), timeout=PROBE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise BenchError(f"no server answers at {self._address}: start one, or correct the address") from None
            raise BenchError(f"{where} cannot be measured: {error.details()}") from None
        if not ready.ready:
            raise BenchError(f"{where} is not ready: wait until it is loaded")
        return config.config

    @staticmethod
    async def _stream(
        stub: Any, message: pb.ModelInferRequest, shape: DeclaredInputs, outcome: RequestOutcome
    ) -> None:
        async for response in _answers(stub, message):
            note_response(shape, response, outcome)


async def _answers(stub: Any, message: pb.ModelInferRequest) -> AsyncIterator[Any]:
    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        yield message

    async for answer in stub.ModelStreamInfer(requests()):
        if answer.error_message:
            raise RequestFailed("ERROR", answer.error_message)
        yield answer.infer_response


def note_response(shape: DeclaredInputs, response: Any, outcome: RequestOutcome) -> None:
    tensors = zip(response.outputs, response.raw_output_contents, strict=True)
    raw = {tensor.name: data for tensor, data in tensors}
    if "num_output_tokens" in raw:
        (count,) = struct.unpack("<I", raw["num_output_tokens"][:4])
    else:
        expected = 1 if shape.is_decoupled else outcome.offered.num_output_tokens
        count = expected if raw.get("text_output", b"")[4:] else 0
    outcome.add_tokens(count)
    ids = raw.get("token_ids", b"")
    outcome.token_ids += struct.unpack(f"<{len(ids) // 4}i", ids)
    reason = raw.get("finish_reason", b"")[4:].decode(errors="replace")
    outcome.finish_reason = outcome.finish_reason if reason in ("", "None") else reason


def _packed(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(data)) + data for data in map(str.encode, values))
    return struct.pack(f"<{len(values)}{'i' if datatype == 'INT32' else '?'}", *values)
