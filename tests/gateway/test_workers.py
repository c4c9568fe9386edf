"""Workers that share a port: their counts are one, a dead one is replaced, and one signal ends all."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests

from support.triton.grpc_triton import FakeTriton, running
from support.triton.serving import free_ports, wait_for

NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    return folder


@contextlib.contextmanager
def gateway(run_dir: Path, url: str = "127.0.0.1:1") -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Start one with two workers; yield its port when they listen."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tidewheel.cli.main", "gateway", f"--port={port}", "--workers=2", f"--url={url}"]
    environment = os.environ | {"TIDEWHEEL_RUN_DIR": str(run_dir)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert f":{port}/v1" in process.stdout.readline()
            yield port, process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def port(run_dir: Path) -> Iterator[int]:
    """Port of a gateway with two workers."""
    with running(FakeTriton(models=("demo",))) as triton, gateway(run_dir, f"127.0.0.1:{triton.port}") as started:
        port, process = started
        wait_for(lambda: is_ready(port) and len(workers_of(port)) == 2, 60, "gateway")
        workers = psutil.Process(process.pid).children()
        yield port
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not any(worker.is_running() for worker in workers)


def is_ready(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=60).ok
    except requests.ConnectionError:
        return False


def complete(port: int) -> requests.Response:
    """Send a request on a connection of its own."""
    return requests.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "one two"}, timeout=60)


def num_answered(port: int) -> int:
    text = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    pattern = r'requests_total\{path="/v1/completions",status="200"\} (\d+)\.0'
    return sum(int(count) for count in re.findall(pattern, text))


def workers_of(port: int) -> list[psutil.Process]:
    listening = {
        one.pid
        for one in psutil.net_connections("tcp")
        if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN
    }
    return [process for process in psutil.process_iter() if process.pid in listening]


def test_counts_are_those_of_all(port: int) -> None:
    before = num_answered(port)
    for _ in range(NUM_REQUESTS):
        wait_for(lambda: complete(port).ok, 60, "an answer, once the worker has looked")
    wait_for(lambda: num_answered(port) == before + NUM_REQUESTS, 60, "counts")
    first, second = workers_of(port)
    first.kill()
    wait_for(lambda: len(workers_of(port)) == 2 and first not in workers_of(port), 60, "another worker")
    assert second in workers_of(port)
    wait_for(lambda: is_ready(port) and complete(port).ok, 60, "service")
    wait_for(lambda: num_answered(port) > before + NUM_REQUESTS, 60, "counts that go on")


def test_a_port_that_another_gateway_has(port: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidewheel.cli.main", "gateway", f"--port={port}", "--workers=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"port {port} of 127.0.0.1 is in use: choose another with --port" in done.stderr


def test_a_port_with_the_last_connections_of_another_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    command = [sys.executable, "-m", "tidewheel.cli.main", "gateway", f"--port={port}", "--workers=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == f"tidewheel: error: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


def test_the_folder_of_a_killed_gateway_is_removed_by_the_next(port: int, run_dir: Path) -> None:
    def folders() -> set[Path]:
        return set(run_dir.glob("gateway-*"))

    living = folders()
    with gateway(run_dir) as (_, killed):
        killed.kill()
        killed.wait()
    (left_over,) = folders() - living
    with gateway(run_dir) as (_, next_one):
        assert living < folders()
        assert left_over not in folders()
        next_one.terminate()
        assert next_one.wait(60) == 0
    assert folders() == living
