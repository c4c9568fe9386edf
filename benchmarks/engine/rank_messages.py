"""Time of what ranks on a CPU exchange: a decode step's message, and sums of tensors, each also by gloo.

    python benchmarks rank_messages --ranks 2

Between two messages the other ranks wait asleep, as they do in an engine. Sums follow each other at once.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed

from common.study import Study, show
from tidewheel.batch import ScheduledBatch
from tidewheel.runner.collectives import MemoryCollectives, create_memory
from tidewheel.runner.step_messages import LeaderLoras, decode_step, encode_step

ROUNDS, LARGE_ROUNDS, WARM_UP, PAUSE_S, LIMIT_S = 1000, 100, 50, 0.0005, 60.0
ACKNOWLEDGED = b"a"
SUMS = [(shape, dtype) for dtype in (torch.float32, torch.bfloat16) for shape in ((1, 576), (16, 576), (256, 4096))]
LARGE = 1 << 19  # elements


class Gloo:
    """Collectives by gloo, over the loopback."""

    def __init__(self, rendezvous: Path, rank: int, num_ranks: int) -> None:
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        self._group = gloo(distributed.FileStore(str(rendezvous), num_ranks), rank, num_ranks, options)

    def all_reduce(self, x: torch.Tensor) -> None:
        self._group.allreduce([x]).wait()

    def broadcast(self, x: torch.Tensor) -> None:
        self._group.broadcast([x]).wait()


class Meeting(NamedTuple):
    """What ranks need to begin."""

    memory: int
    rendezvous: Path
    num_ranks: int

    def groups(self, rank: int) -> Mapping[str, MemoryCollectives | Gloo]:
        torch.set_num_threads(1)
        return {
            "shared memory": MemoryCollectives(self.memory, rank, self.num_ranks, LIMIT_S),
            "gloo": Gloo(self.rendezvous, rank, self.num_ranks),
        }


def step(num_rows: int) -> ScheduledBatch:
    """Return decodes, one row in 16 of which begins a block."""
    rows = np.arange(num_rows, dtype=np.int32)
    ones, new = np.ones(num_rows, np.int32), rows[::16]
    places = {"block_rows": new, "block_indices": new, "block_ids": new}
    return ScheduledBatch(1, rows, rows + 1000, ones, ones.astype(np.bool_), num_rows, num_rows, **places)


def answer(rank: int, meeting: Meeting, connection: Connection, size: int) -> None:
    groups, memory = meeting.groups(rank), torch.zeros(size, dtype=torch.uint8)
    for _ in range(ROUNDS):
        decode_step(connection.recv_bytes(), {})
        connection.send_bytes(ACKNOWLEDGED)
    for group in groups.values():
        for _ in range(ROUNDS):
            group.broadcast(memory)
            connection.send_bytes(ACKNOWLEDGED)
    sums(groups)


def timed_messages(send: Callable[[], None], connections: list[Connection]) -> dict[str, float]:
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        send()
        seconds.append(time.perf_counter() - began)
        for connection in connections:
            connection.recv_bytes()
        time.sleep(PAUSE_S)  # the others wait asleep, as between steps
    return summary(seconds)


def sums(groups: Mapping[str, MemoryCollectives | Gloo]) -> list[dict[str, object]]:
    """Return the time of each way's sum of each tensor, in the order that all ranks have."""
    rows: list[dict[str, object]] = []
    for shape, dtype in SUMS:
        for way, group in groups.items():
            x, seconds = torch.ones(shape, dtype=dtype), []
            for _ in range(LARGE_ROUNDS if x.numel() > LARGE else ROUNDS):
                began = time.perf_counter()
                group.all_reduce(x)
                seconds.append(time.perf_counter() - began)
                x.fill_(1)
            rows.append({"shape": shape, "dtype": str(dtype).removeprefix("torch."), "way": way} | summary(seconds))
    return rows


def summary(seconds: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(seconds[WARM_UP:], n=10)
    return {"median_us": deciles[4] * 1e6, "p90_us": deciles[8] * 1e6}


def main() -> None:
    study = Study("rank_messages", __doc__, "torch", "msgspec")
    study.add_argument("--ranks", type=int, default=2)
    study.add_argument("--rows", type=int, default=256, help="of the step")
    arguments = study.begin()
    batch, connections = step(arguments.rows), []
    loras = LeaderLoras(())
    size = len(encode_step(batch, loras))
    with tempfile.TemporaryDirectory() as folder:
        meeting = Meeting(create_memory(arguments.ranks), Path(folder) / "rendezvous", arguments.ranks)
        for rank in range(1, arguments.ranks):
            ours, theirs = Pipe()
            connections.append(ours)
            if os.fork() == 0:
                answer(rank, meeting, theirs, size)
                os._exit(0)
        groups = meeting.groups(0)

    def send() -> None:
        data = encode_step(batch, loras)
        for connection in connections:
            connection.send_bytes(data)

    memory = torch.zeros(size, dtype=torch.uint8)
    messages = {"sockets, with encoding": timed_messages(send, connections)}
    for name, group in groups.items():
        messages[f"broadcast, {name}"] = timed_messages(lambda group=group: group.broadcast(memory), connections)
    reduced = sums(groups)
    show({"way": name, **rounded(row)} for name, row in messages.items())
    show(map(rounded, reduced))
    study.save({"bytes": size, "ways": messages, "sums": reduced})


def rounded(row: Mapping[str, object]) -> dict[str, object]:
    return {key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()}


if __name__ == "__main__":
    main()
