"""A model served by `tidewheel serve` in processes of its own."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2

from common.study import ROOT
from tidewheel_client import Client, Figures

LOCUSTFILE = ROOT / "client" / "tidewheel_client" / "load" / "locustfile.py"
START_LIMIT_S = 300.0
HTTP = httpx2.Client(trust_env=False, verify=False, timeout=10)  # for addresses without TLS


class Address(NamedTuple):
    grpc: str
    http: str
    model: str
    metrics: str
    health: str


def free_ports(count: int) -> int:
    """Return the first of so many free ports in a row, below those that the system gives."""
    while True:
        first = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@contextmanager
def served(
    folder: Path, settings: Mapping[str, object], *, ports: int = 18_700, arguments: Sequence[str] = ()
) -> Iterator[Address]:
    """Serve a Hugging Face folder on `ports` and the three that follow (HTTP, gRPC, metrics, health)."""
    given = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
    with _served(["--model", str(folder), *arguments, *given], folder.name, ports) as address:
        yield address


@contextmanager
def serving_repository(
    repository: Path, model: str, *, ports: int, arguments: Sequence[str] = ()
) -> Iterator[Address]:
    """Serve a model repository, as `served` does, and wait for one of its models."""
    with _served(["--model-repository", str(repository), *arguments], model, ports) as address:
        yield address


class Served:
    """A `tidewheel serve`, and where it listens: on four ports from `ports` on."""

    def __init__(
        self,
        arguments: Sequence[str],
        model: str,
        ports: int,
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix` is a command that runs the server."""
        command = [*prefix, sys.executable, "-m", "tidewheel.cli.main", "serve", *arguments, "--host", host]
        for offset, option in enumerate(("--http-port", "--grpc-port", "--metrics-port", "--health-port")):
            command += [option, str(ports + offset)]
        http, grpc, metrics, health = (f"{host}:{ports + offset}" for offset in range(4))
        self.address = Address(grpc, http, model, metrics, health)
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)

    def wait_ready(self) -> None:
        """Raise RuntimeError if the server ends too early."""
        end = time.monotonic() + START_LIMIT_S
        with Client(self.address.grpc, model=self.address.model) as client:
            while not client.is_ready():
                if self.process.poll() is not None:
                    raise RuntimeError(
                        f"tidewheel serve ended with status {self.process.returncode} before it was ready"
                    )
                if time.monotonic() > end:
                    raise RuntimeError(f"tidewheel serve was not ready within {START_LIMIT_S:g} s")
                time.sleep(0.1)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(number)
        self.process.wait(60)


@contextmanager
def _served(arguments: Sequence[str], model: str, ports: int) -> Iterator[Address]:
    server = Served(arguments, model, ports)
    try:
        server.wait_ready()
        yield server.address
    finally:
        server.stop()


def metric(authority: str, name: str, **labels: str) -> float:
    """Sum the samples of one name whose labels match, on the page of a server."""
    figures = Figures.parse(HTTP.get(f"http://{authority}/metrics").text)
    return sum(sample.value for sample in figures.samples(name, **labels))
