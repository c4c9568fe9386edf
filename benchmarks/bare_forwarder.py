"""What any gateway of grpc.aio adds to a chunk: it reads a stream, and writes a line for each response.

    python benchmarks/bare_forwarder.py PORT HOST:PORT MODEL MAX_TOKENS

Each connection to the port begins a stream, and its end cancels it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import grpc
from tritonclient.grpc import service_pb2

from stream_readers import TOKEN, Asked, request_of
from tidewheel_client.grpc_transport import CHANNEL_OPTIONS, STREAM_METHOD

LINE = TOKEN + b"\n"


async def forward(asked: Asked, writer: asyncio.StreamWriter) -> None:
    async with grpc.aio.insecure_channel(asked.address, options=CHANNEL_OPTIONS) as channel:
        method = channel.stream_stream(
            STREAM_METHOD,
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        call = method(iter([request_of(asked)]))
        async for _ in call:
            writer.write(LINE)


async def serve(port: int, asked: Asked) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forwarding = asyncio.create_task(forward(asked, writer))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        forwarding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await forwarding
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    _, own_port, address, model, max_tokens = sys.argv
    asyncio.run(serve(int(own_port), Asked(address, model, int(max_tokens))))
