"""Time that the first rank takes to send a decode step to the others, by our sockets and by gloo's broadcast.

    python benchmarks rank_messages --ranks 2

Between two steps the other ranks wait asleep, as they do in an engine.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from common.study import Study, show
from tidewheel.batch import ScheduledBatch
from tidewheel.runner.collectives import ProcessCollectives
from tidewheel.runner.rank_group import framed, receive
from tidewheel.runner.step_messages import decode_step, encode_step

ROUNDS, WARM_UP, PAUSE_S, LIMIT_S = 1000, 50, 0.0005, 60.0
ACKNOWLEDGED = b"a"


def step(num_rows: int) -> ScheduledBatch:
    """Return decodes, one row in 16 of which begins a block."""
    rows = np.arange(num_rows, dtype=np.int32)
    ones, new = np.ones(num_rows, np.int32), rows[::16]
    places = {"block_rows": new, "block_indices": new, "block_ids": new}
    return ScheduledBatch(1, rows, rows + 1000, ones, ones.astype(np.bool_), num_rows, num_rows, **places)


def answer(rank: int, num_ranks: int, rendezvous: Path, connection: socket.socket, size: int) -> None:
    group = ProcessCollectives(rendezvous, rank, num_ranks, torch.device("cpu"), LIMIT_S)
    stream, memory = connection.makefile("rb"), torch.zeros(size, dtype=torch.uint8)
    for _ in range(ROUNDS):
        message = receive(stream)
        assert message is not None
        decode_step(message)
        connection.send(ACKNOWLEDGED)
    for _ in range(ROUNDS):
        group.broadcast(memory)
        connection.send(ACKNOWLEDGED)


def timed(send: Callable[[], None], connections: list[socket.socket]) -> dict[str, float]:
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        send()
        seconds.append(time.perf_counter() - began)
        for connection in connections:
            connection.recv(1)
        time.sleep(PAUSE_S)  # the others wait asleep, as between steps
    deciles = statistics.quantiles(seconds[WARM_UP:], n=10)
    return {"median_us": deciles[4] * 1e6, "p90_us": deciles[8] * 1e6}


def main() -> None:
    study = Study("rank_messages", __doc__, "torch", "msgspec")
    study.add_argument("--ranks", type=int, default=2)
    study.add_argument("--rows", type=int, default=256, help="of the step")
    arguments = study.begin()
    torch.set_num_threads(1)
    batch, connections = step(arguments.rows), []
    size = len(encode_step(batch))
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "rendezvous"
        for rank in range(1, arguments.ranks):
            ours, theirs = socket.socketpair()
            connections.append(ours)
            if os.fork() == 0:
                answer(rank, arguments.ranks, rendezvous, theirs, size)
                os._exit(0)
        group = ProcessCollectives(rendezvous, 0, arguments.ranks, torch.device("cpu"), LIMIT_S)

    def send() -> None:
        data = framed(encode_step(batch))
        for connection in connections:
            connection.sendall(data)

    memory = torch.zeros(size, dtype=torch.uint8)
    ways = {"sockets, with encoding": send, "gloo's broadcast": lambda: group.broadcast(memory)}
    found = {name: timed(way, connections) for name, way in ways.items()}
    show({"way": name, **{key: round(value, 1) for key, value in row.items()}} for name, row in found.items())
    study.save({"bytes": size, "ways": found})


if __name__ == "__main__":
    main()
