"""What a process between server and client adds to a chunk: it reads a stream, and writes a line for each response.

    python benchmarks bare_forwarder PORT HOST:PORT MODEL MAX_TOKENS grpc.aio
    python benchmarks bare_forwarder PORT HOST:PORT MODEL MAX_TOKENS frames

Each connection to the port begins a stream, and its end cancels it. `grpc.aio` does what any gateway of this library
has to do. `frames` has a thread for each stream, which only takes frames apart: no other process does less.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading

import grpc
from tritonclient.grpc import service_pb2

from common.stream_readers import TOKEN, Asked, GrpcReader, request_of
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


def forward_frames(asked: Asked, client: socket.socket) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = GrpcReader(asked, 1, again=False)
    with client, reader.socket, contextlib.suppress(ConnectionError):
        while not reader.num_ended:
            for _, num_tokens in reader.read():
                if num_tokens:
                    client.sendall(LINE)


def serve_frames(port: int, asked: Asked) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            client, _ = server.accept()
            threading.Thread(target=forward_frames, args=(asked, client), daemon=True).start()


if __name__ == "__main__":
    _, own_port, address, model, max_tokens, way = sys.argv
    to = Asked(address, model, int(max_tokens))
    if way == "frames":
        serve_frames(int(own_port), to)
    else:
        asyncio.run(serve(int(own_port), to))
