"""One client process of the load: streams requests over gRPC, all at once, without torch.

Reads a JSON object from standard input (address, model, work as [input_ids, output tokens]), answers "ready" once
connected, sends on a second line, and writes each stream's arrivals.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import IO, Any, NamedTuple

from gpu.work import TEMPERATURE
from tidewheel.bench.driver import Driver, Limits, Progress
from tidewheel.bench.outcome import Offered
from tidewheel.bench.transports.triton_grpc import TritonGrpc
from workload import WorkItem

TIMEOUT_S = 120.0


class Stream(NamedTuple):
    """Answer on the machine's monotonic clock."""

    arrivals: list[tuple[float, int]]  # (when, tokens)
    error: str

    def gaps(self) -> list[float]:
        """Return times between tokens; tokens that arrive together split the gap, as in `Outcome`."""
        found: list[float] = []
        for (before, _), (now, count) in pairwise(self.arrivals):
            found += [(now - before) / count] * count
        return found


def stream_all(address: str, model: str, work: Sequence[WorkItem], num_clients: int) -> tuple[float, list[Stream]]:
    """Return the time of sending, and streams; raise RuntimeError if a client failed."""
    clients = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "gpu.stream_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(num_clients)
    ]
    try:
        for number, client in enumerate(clients):
            share = [(item.input_ids, item.num_output_tokens) for item in work[number::num_clients]]
            _write(client.stdin, {"address": address, "model": model, "work": share})
        for client in clients:
            _read(client.stdout)
        begin = time.perf_counter()
        for client in clients:
            _write(client.stdin, "go")
        streams = [Stream(*fields) for client in clients for fields in _read(client.stdout)]
    finally:
        for client in clients:
            client.kill()
            client.wait()
    errors = [stream.error or "no token" for stream in streams if stream.error or not stream.arrivals]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(streams)} streams failed: {errors[0]}")
    return begin, streams


def _write(pipe: IO[str] | None, value: object) -> None:
    assert pipe is not None
    pipe.write(json.dumps(value) + "\n")
    pipe.flush()


def _read(pipe: IO[str] | None) -> Any:
    assert pipe is not None
    line = pipe.readline()
    if not line:
        raise RuntimeError("a client process has ended; its message is above")
    return json.loads(line)


async def _client(address: str, model: str, work: list[tuple[list[int], int]]) -> list[Stream]:
    transport, progress = TritonGrpc(address, model), Progress()
    await transport.open()
    try:
        _write(sys.stdout, "ready")
        sys.stdin.readline()
        load = [
            (Offered(0.0, input_ids, num_output, {"temperature": TEMPERATURE}),) for input_ids, num_output in work
        ]
        await Driver(transport, Limits(seconds=TIMEOUT_S, timeout_s=TIMEOUT_S), progress).open_loop(load)
    finally:
        await transport.close()
    return [Stream([(one.origin + at, count) for at, count in one.chunks], one.error) for one in progress.outcomes]


def main() -> None:
    task = json.loads(sys.stdin.readline())
    _write(sys.stdout, asyncio.run(_client(task["address"], task["model"], task["work"])))


if __name__ == "__main__":
    main()
