"""Processes that keep cores busy, and the rate at which the cores read memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

READS = 12
SETTLE_S = 1.0  # of busy processes, before what is measured begins
BUSY = """
import os, sys
os.nice(int(sys.argv[1]))
if os.path.exists("/proc/self/autogroup"):
    open("/proc/self/autogroup", "w").write(sys.argv[1])
print(flush=True)
parent = os.getppid()
while os.getppid() == parent:
    pass
"""


@contextmanager
def busy_processes(count: int, nice: int = 0) -> Iterator[None]:
    """Keep `count` processes busy at niceness `nice` >= 0, each in a session of its own, as another user's is.

    Linux weighs sessions first where autogroups are on; the niceness of a group then counts, not that of its process
    (sched(7)).
    """
    command = [sys.executable, "-c", BUSY, str(nice)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(SETTLE_S if processes else 0.0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def read_bytes_per_s(num_bytes: int, threads: int) -> float:
    """Return the best rate of a plain read of so many bytes, by two ways of summing them."""
    words = torch.ones(num_bytes // 8, dtype=torch.float64)
    shares = [part.numpy() for part in words.chunk(threads)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ThreadPoolExecutor(threads) as pool:
            ways = (words.view(torch.int64).sum, lambda: list(pool.map(lambda share: share.sum(), shares)))
            seconds = min(_seconds(way) for way in ways for _ in range(READS))
    finally:
        torch.set_num_threads(before)
    return words.nbytes / seconds


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
