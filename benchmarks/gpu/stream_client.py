"""One client process of the load: streams requests over gRPC, all at once, without torch.

Reads a JSON object from standard input (address, model, work as [input_ids, output tokens]), answers "ready" once
connected, sends on a second line, and writes its streams.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.offered_load import run
from common.work_items import TEMPERATURE, WorkItem
from tidewheel.bench.outcome import OfferedRequest
from tidewheel.bench.worker_process import WorkerProcess

TIMEOUT_S = 200.0


class Stream(NamedTuple):
    """Answer, in seconds on the machine's monotonic clock."""

    arrivals: list[tuple[float, int]]  # (when, tokens)
    gaps: list[float]  # between tokens; those that arrive together split it
    error: str


def stream_all(
    address: str, model: str, work: Sequence[WorkItem], num_clients: int, log: Path
) -> tuple[float, list[Stream]]:
    """Return the time of sending, and streams; raise RuntimeError or `WorkerFailed` if a client failed."""
    command = [sys.executable, "-P", "-m", "gpu.stream_client"]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(WorkerProcess("a client", command, log)) for _ in range(num_clients)]
        for number, client in enumerate(clients):
            share = [(item.input_ids, item.num_output_tokens) for item in work[number::num_clients]]
            client.send({"address": address, "model": model, "work": share})
        for client in clients:
            client.receive(TIMEOUT_S)
        begin = time.perf_counter()
        for client in clients:
            client.send("go")
        streams = [Stream(*fields) for client in clients for fields in client.receive(TIMEOUT_S)]
    errors = [stream.error or "no token" for stream in streams if stream.error or not stream.arrivals]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(streams)} streams failed: {errors[0]}")
    return begin, streams


def wait_for_go() -> None:
    print('"ready"', flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    task = json.loads(sys.stdin.readline())
    load = [OfferedRequest(0.0, input_ids, count, {"temperature": TEMPERATURE}) for input_ids, count in task["work"]]
    outcomes = run(task["address"], task["model"], load, wait_for_go)
    streams = [([(o.origin + at, n) for at, n in o.chunks], o.inter_token_latencies(), o.error) for o in outcomes]
    print(json.dumps(streams), flush=True)
