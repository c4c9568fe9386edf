"""Figures of a running server, sampled and at rest."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections import deque

import psutil
import requests

from support.faults.nothing_lost import Footprint
from support.faults.own_mounts import OwnMount
from support.marathon.ledger import Rest, Sample
from support.triton.serving import Server
from tidewheel.bench.driver import RunProgress

INTERVAL_S = 2.0
REST_LIMIT_S = 30.0
STEADY_LOOKS = 6  # half a second apart
LOADED = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
GONE = Rest(math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, [], {})
CRASH = re.compile(r"Segmentation|SIGSEGV|device-side assert|illegal memory|double free|leak detected")


def loaded(server: Server) -> list[float]:
    """Return what runs, what waits, and the share of the blocks in use; NaN without an answer."""
    try:
        samples = server.metrics()
    except requests.RequestException:
        return [math.nan] * len(LOADED)
    return [sum(sample.value for sample in samples.samples(name)) for name in LOADED]


class Watch:
    def __init__(self, server: Server, progress: RunProgress) -> None:
        self._server = server
        self._now = progress.now
        self.samples: list[Sample] = []

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self._sample)
            await asyncio.sleep(INTERVAL_S)

    def _sample(self) -> None:
        with contextlib.suppress(psutil.Error, StopIteration):  # of a server that starts again
            at, now = self._now(), Footprint.of(self._server)
            self.samples.append(Sample(at, now.memory, now.descriptors, now.threads, *loaded(self._server)))


def at_rest(server: Server, disk: OwnMount) -> Rest:
    """Wait until nothing runs and nothing changes, at most for a while."""
    deadline = time.monotonic() + REST_LIMIT_S
    last: deque[Rest] = deque(maxlen=STEADY_LOOKS)
    while server.process.poll() is None:
        last.append(_look(server, disk))
        handles = {(one.descriptors, one.threads, one.kv_use + one.unfinished) for one in last}
        is_steady = len(last) == STEADY_LOOKS and len(handles) == 1 and not handles.pop()[2]
        if is_steady or time.monotonic() > deadline:
            return last[-1]
        time.sleep(0.5)
    return GONE


def _look(server: Server, disk: OwnMount) -> Rest:
    now = Footprint.of(server)
    running, waiting, kv_use = loaded(server)
    return Rest(
        kv_use=kv_use,
        unfinished=running + waiting,
        memory=now.memory,
        descriptors=now.descriptors,
        threads=now.threads,
        shared_memory=now.shared_memory,
        files=disk.files(),
        processes=dict(now.processes),
    )


def crash_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if CRASH.search(line)]


def processes_with(variable: str, prefix: str) -> list[psutil.Process]:
    """Return the processes whose environment variable begins so."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable, "").startswith(prefix) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
