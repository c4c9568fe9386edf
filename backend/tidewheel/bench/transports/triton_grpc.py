"""Triton over gRPC: a stream per decoupled request, else unary calls.

One asyncio loop and a few shared channels keep the load cheap beside a server on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tidewheel.bench import BenchError
from tidewheel.bench.outcome import Offered, Outcome, RequestFailed
from tidewheel.bench.transports.triton_tensors import ModelShape, build_request, read_response

NUM_CHANNELS = 4
PROBE_S = 5.0
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)


class TritonGrpc:
    """Ask for token ids `with_ids`, for later turns of conversations."""

    def __init__(self, address: str, model: str, *, with_ids: bool = False) -> None:
        self._address = address
        self._model = model
        self._with_ids = with_ids
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[Any] = []
        self._sent = 0
        self._shape: ModelShape | None = None

    async def open(self) -> None:
        self._channels = [grpc.aio.insecure_channel(self._address, options=_OPTIONS) for _ in range(NUM_CHANNELS)]
        self._stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        try:
            await self._look()
        except BaseException:
            await self.close()
            raise

    async def send(self, offered: Offered, input_ids: Sequence[int], outcome: Outcome) -> None:
        shape = self._shape
        assert shape is not None
        self._sent += 1
        stub = self._stubs[self._sent % NUM_CHANNELS]
        message = build_request(shape, offered, input_ids, with_ids=self._with_ids)
        outcome.streamed = shape.is_decoupled
        try:
            if shape.is_decoupled:
                await self._stream(stub, message, shape, outcome)
            else:
                _note(shape, await stub.ModelInfer(message), outcome)
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error.code().name, str(error.details())) from None

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        self._channels, self._stubs = [], []

    async def _look(self) -> None:
        stub = self._stubs[0]
        where = f"model {self._model!r} at {self._address}"
        try:
            ready = await stub.ModelReady(pb.ModelReadyRequest(name=self._model), timeout=PROBE_S)
            config = await stub.ModelConfig(pb.ModelConfigRequest(name=self._model), timeout=PROBE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise BenchError(f"no server answers at {self._address}: start one, or correct the address") from None
            raise BenchError(f"{where} cannot be measured: {error.details()}") from None
        if not ready.ready:
            raise BenchError(f"{where} is not ready: wait until it is loaded")
        self._shape = ModelShape.from_config(config.config)

    @staticmethod
    async def _stream(stub: Any, message: pb.ModelInferRequest, shape: ModelShape, outcome: Outcome) -> None:
        async def requests() -> Any:
            yield message

        async for answer in stub.ModelStreamInfer(requests()):
            if answer.error_message:
                raise RequestFailed("ERROR", answer.error_message)
            _note(shape, answer.infer_response, outcome)


def _note(shape: ModelShape, response: Any, outcome: Outcome) -> None:
    expected = 1 if shape.is_decoupled else outcome.offered.num_output_tokens
    piece = read_response(response, expected)
    outcome.add_tokens(piece.num_tokens)
    outcome.token_ids += piece.token_ids
    outcome.finish_reason = piece.finish_reason or outcome.finish_reason
