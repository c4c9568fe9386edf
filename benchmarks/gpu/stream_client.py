"""One client process of the load: streams requests over gRPC, all at once, without torch.

Reads a JSON object from standard input (address, model, work as [input_ids, output tokens]), answers "ready" once
connected, sends on a second line, and writes its streams.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

from offered_load import run
from tidewheel.bench.values import Offered
from work_items import TEMPERATURE, WorkItem


class Stream(NamedTuple):
    """Answer, in seconds on the machine's monotonic clock."""

    arrivals: list[tuple[float, int]]  # (when, tokens)
    gaps: list[float]  # between tokens; those that arrive together split it
    error: str


def stream_all(address: str, model: str, work: Sequence[WorkItem], num_clients: int) -> tuple[float, list[Stream]]:
    """Return the time of sending, and streams; raise RuntimeError if a client failed."""
    command = [sys.executable, "-P", "-m", "gpu.stream_client"]
    clients = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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


def _wait_for_go() -> None:
    _write(sys.stdout, "ready")
    sys.stdin.readline()


if __name__ == "__main__":
    task = _read(sys.stdin)
    load = [Offered(0.0, input_ids, count, {"temperature": TEMPERATURE}) for input_ids, count in task["work"]]
    outcomes = run(task["address"], task["model"], load, _wait_for_go)
    _write(
        sys.stdout,
        [([(o.origin + at, n) for at, n in o.chunks], o.inter_token_latencies(), o.error) for o in outcomes],
    )
