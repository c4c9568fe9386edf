"""Replicas with a modelled device and a gateway in front of them, whose number may change under load."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, Self

import httpx2
import psutil

from cluster.named_gateway import NAME
from common.serving import Address, Served, free_ports, metric
from common.study import ROOT
from modelled.engine import modelled
from tidewheel_process import process_tree
from tidewheel_process.child import wait_until

LIMIT_S = 120.0
_READY = "tidewheel_gateway_upstream_ready"


class Servers(Protocol):
    """What is measured: a gateway, and replicas that it knows."""

    gateway: str  # authority of its HTTP port
    model: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def scale(self, count: int) -> None:
        """Return when the gateway has so many ready replicas. One that goes ends what it has first."""

    def replicas(self) -> list[Address]:
        """Return those that get new requests."""

    def kill_one(self, *, alone: bool) -> float:
        """Kill all processes of a replica at once, or the one above its server alone, and return when.

        It is started again.
        """

    def pids(self) -> Mapping[str, list[int]]:
        """Return the processes of each part: `replicas`, `gateway`, and what else there is."""


class ListServers:
    """Servers on addresses of loopback that `named_gateway.py` lists; this object is their service manager."""

    def __init__(self, folder: Path, settings: Mapping[str, object], step_s: float) -> None:
        """`folder` has the model; `settings` are those of the engine."""
        self.model = folder.name
        self._environment = {**os.environ, **modelled(step_s)}
        self._arguments = ["--model", str(folder), "--allow-faults", "--drain-s", "60"]
        self._arguments += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        self._ports = free_ports(5)
        self.gateway = f"127.0.0.1:{self._ports + 4}"
        self._names = folder.parent / "names"
        self._running: dict[str, Served] = {}  # by host
        self._going: list[Served] = []
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        self._names.write_text("")
        grpc, metrics, health = (self._ports + offset for offset in (1, 2, 3))
        command = [sys.executable, str(ROOT / "benchmarks" / "named_gateway.py"), str(self._names), "gateway"]
        command += ["--url", f"dns:{NAME}:{grpc},metrics={metrics},health={health}"]
        self._process = subprocess.Popen(
            [*command, "--port", str(self._ports + 4)], stdout=subprocess.DEVNULL, env=self._environment
        )
        return self

    def __exit__(self, *error: object) -> None:
        for server in (*self._running.values(), *self._going):
            server.process.send_signal(signal.SIGINT)
        self._process.terminate()
        for process in (self._process, *(one.process for one in (*self._running.values(), *self._going))):
            process.wait(60)

    def scale(self, count: int) -> None:
        # Each at an address of its own, as pods have: one that goes may still end its requests.
        hosts = [f"127.0.0.{next(self._numbers)}" for _ in range(count - len(self._running))]
        new = {host: self._start(host) for host in hosts}
        self._running |= new
        if new:
            with ThreadPoolExecutor(len(new)) as pool:
                list(pool.map(Served.wait_ready, new.values()))
        leaving = [self._running.pop(host) for host in list(self._running)[count:]]
        self._tell()
        wait_known(self.gateway, count)
        for server in leaving:
            server.process.terminate()
        self._going += leaving

    def replicas(self) -> list[Address]:
        return [server.address for server in self._running.values()]

    def kill_one(self, *, alone: bool) -> float:
        host, server = list(self._running.items())[-1]
        below = process_tree.descendants(server.process.pid)
        killed = kill_tree(server.process.pid, alone=alone)
        server.process.wait()
        wait_until(lambda: not any(map(process_tree.is_alive, below)), LIMIT_S)  # for its ports
        self._running[host] = self._start(host)
        return killed

    def pids(self) -> Mapping[str, list[int]]:
        serves = [server.process.pid for server in self._running.values()]
        below = [process.pid for serve in serves for process in process_tree.descendants(serve)]
        return {"replicas": [*serves, *below], "gateway": [self._process.pid]}

    def _start(self, host: str) -> Served:
        return Served(self._arguments, self.model, self._ports, host, self._environment)

    def _tell(self) -> None:
        """Write the file whole, since the gateway reads it at any moment."""
        new = self._names.with_suffix(".new")
        new.write_text("\n".join(self._running))
        new.replace(self._names)


def kill_tree(pid: int, *, alone: bool) -> float:
    """Kill a process, and all below it unless `alone`, and return when."""
    below = [] if alone else process_tree.descendants(pid)
    tree = [psutil.Process(pid), *below]
    killed = time.monotonic()
    process_tree.signal_all(tree, signal.SIGKILL)
    return killed


def wait_known(gateway: str, count: int) -> None:
    """Raise RuntimeError if the gateway never has so many ready servers."""
    end = time.monotonic() + LIMIT_S
    while num_ready(gateway) != count:
        if time.monotonic() > end:
            raise RuntimeError(f"the gateway has not {count} ready servers after {LIMIT_S:g} s")
        time.sleep(0.1)


def num_ready(gateway: str) -> int:
    """Return how many servers the gateway finds ready; -1 if it does not answer."""
    try:
        return int(metric(gateway, _READY))
    except httpx2.HTTPError:
        return -1
