"""Client that sends one tensor request again and again, in bytes made once: it costs the machine little."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import grpc
from tritonclient.grpc import InferenceServerClient

from tidewheel.bench.transports.tensors import OneShotModel, tensor_request
from tidewheel.one_shot.signature import Arrays
from tidewheel.workload.arrivals import poisson_until

METHOD = "/inference.GRPCInferenceService/ModelInfer"
NUM_CHANNELS = 4
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)


class Sent(NamedTuple):
    begin: float  # seconds
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class TensorClient:
    def __init__(self, address: str, model: str, inputs: Arrays) -> None:
        with InferenceServerClient(address) as client:
            config = client.get_model_config(model).config
        self._address = address
        self._request = tensor_request(OneShotModel(model, inputs), config).SerializeToString()

    def one_by_one(self, count: int) -> list[Sent]:
        return asyncio.run(self._closed(1, lambda sent: len(sent) >= count))

    def in_flight(self, count: int, seconds: float) -> list[Sent]:
        """Keep so many requests in flight."""
        end = time.monotonic() + seconds
        return asyncio.run(self._closed(count, lambda _: time.monotonic() >= end))

    def poisson(self, rate: float, seconds: float, seed: int) -> list[Sent]:
        """Send requests at random times, equal for one seed."""
        return asyncio.run(self._open(poisson_until(seconds, rate, random.Random(seed))))

    async def _closed(self, count: int, is_over: Callable[[list[Sent]], bool]) -> list[Sent]:
        sent: list[Sent] = []
        async with self._calls() as call:

            async def user() -> None:
                while not is_over(sent):
                    begin = time.monotonic()
                    await call()
                    sent.append(Sent(begin, time.monotonic()))

            await asyncio.gather(*(user() for _ in range(count)))
        return sent

    async def _open(self, times: list[float]) -> list[Sent]:
        sent: list[Sent] = []
        async with self._calls() as call, asyncio.TaskGroup() as tasks:
            start = time.monotonic()

            async def one(begin: float) -> None:
                await call()
                sent.append(Sent(begin, time.monotonic()))

            for at in times:
                await asyncio.sleep(max(0.0, start + at - time.monotonic()))
                tasks.create_task(one(start + at))
        return sent

    @asynccontextmanager
    async def _calls(self) -> AsyncIterator[Callable[[], object]]:
        channels = [grpc.aio.insecure_channel(self._address, options=OPTIONS) for _ in range(NUM_CHANNELS)]
        methods = [channel.unary_unary(METHOD) for channel in channels]
        number = 0

        def call() -> object:
            nonlocal number
            number += 1
            return methods[number % NUM_CHANNELS](self._request)

        try:
            yield call
        finally:
            for channel in channels:
                await channel.close()


def per_second(sent: list[Sent]) -> float:
    """Return answers a second, without the first fifth and what was sent last."""
    ends = sorted(one.end for one in sent)
    first, last = len(ends) // 5, len(ends) - 1 - len(ends) // 20
    return (last - first) / (ends[last] - ends[first]) if last > first else 0.0
