"""CPU time of `AsyncClient` and of `Client` beside raw `grpc.aio`, for a thousand streams from one process.

    python benchmarks client_cost --save

The server is another process, which answers every stream with the same responses, as fast as they are read. *raw*
reads messages and looks into none. *threads* is `Client`, with 16 streams at a time; the others have all at once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from common.serving import free_ports
from common.study import Study, in_turns
from tidewheel_client import Ask, AsyncClient, Client, codec

METHOD = "ModelStreamInfer"
NUM_THREADS = 16
SERVICE = "inference.GRPCInferenceService"


def message(*, is_last: bool) -> bytes:
    """Return a response as the server sends it: a text, its finish reason and two counts."""
    answer = pb.ModelStreamInferResponse()
    answer.infer_response.model_name = "demo"
    texts = {"text_output": b" tide", "finish_reason": b"stop" if is_last else b"None"}
    for name, text in texts.items():
        answer.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        answer.infer_response.raw_output_contents.append(struct.pack("<I", len(text)) + text)
    for name in ("num_input_tokens", "num_output_tokens"):
        answer.infer_response.outputs.add(name=name, datatype="UINT32", shape=[1])
        answer.infer_response.raw_output_contents.append(struct.pack("<I", 1))
    return answer.SerializeToString()


def serve(port: int, num_responses: int, pipe: Connection) -> None:
    asyncio.run(_serve(port, [message(is_last=i == num_responses - 1) for i in range(num_responses)], pipe))


async def _serve(port: int, messages: list[bytes], pipe: Connection) -> None:
    async def answer(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for _request in requests:
            for one in messages:
                yield one

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(answer)  # bytes in and out
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    pipe.send("ready")
    await server.wait_for_termination()


@contextmanager
def serving(num_responses: int) -> Iterator[str]:
    port = free_ports(1)
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(port, num_responses, theirs), daemon=True)
    process.start()
    try:
        pipe.recv()
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()


async def raw(url: str, num_streams: int) -> int:
    async def once() -> AsyncIterator[pb.ModelInferRequest]:
        yield codec.encode(Ask(model="demo", request_id="x", prompt={"text_input": "x"}, stream=True))

    async def read(stub: Any) -> int:
        return sum([1 async for _ in stub.ModelStreamInfer(once())])

    async with grpc.aio.insecure_channel(url) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return sum(await asyncio.gather(*(read(stub) for _ in range(num_streams))))


async def ours(url: str, num_streams: int) -> int:
    async def read(client: AsyncClient) -> int:
        return sum([1 async for _ in client.stream("x")])

    async with AsyncClient(url) as client:
        return sum(await asyncio.gather(*(read(client) for _ in range(num_streams))))


async def threads(url: str, num_streams: int) -> int:
    def read(_: int) -> int:
        return sum(1 for _ in client.stream("x"))

    with Client(url) as client, ThreadPoolExecutor(NUM_THREADS) as pool:
        return sum(pool.map(read, range(num_streams)))


def cpu_us(run: Callable[[str, int], Awaitable[int]], url: str, num_streams: int, num_responses: int) -> float:
    """Return the CPU time of this process for a response."""

    async def once() -> int:
        return await run(url, num_streams)

    began = time.process_time()
    count = asyncio.run(once())
    spent = time.process_time() - began
    assert count == num_streams * num_responses, count
    return round(1e6 * spent / count, 2)


def main() -> None:
    study = Study("client_cost", __doc__, "grpcio", "protobuf")
    study.add_argument("--streams", type=int, default=1000)
    study.add_argument("--responses", type=int, default=50, help="of a stream")
    study.add_argument("--rounds", type=int, default=5)
    options = study.begin()
    with serving(options.responses) as url:
        runs = {
            name: lambda run=run: cpu_us(run, url, options.streams, options.responses)
            for name, run in (("raw", raw), ("client", ours), ("threads", threads))
        }
        samples = in_turns(runs, options.rounds, warm_up=1)
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    ratio = round(medians["client"] / medians["raw"], 3)
    print(f"CPU time a response: {', '.join(f'{name} {spent} us' for name, spent in medians.items())}; {ratio} times")
    study.save({"streams": options.streams, "cpu_us_per_response": medians, "ratio": ratio})


if __name__ == "__main__":
    main()
