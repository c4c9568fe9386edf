"""A server behind the gateway is killed: its streams end with an error, and other requests go to the other server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import requests

from support.faults.slowed import pace_of, slow_down
from support.triton.serving import Server, free_ports, wait_for
from tidewheel.metrics import UPSTREAM_READY
from tidewheel_client import Figures

pytestmark = pytest.mark.e2e
NUM_STREAMS = 4
LIMIT_S = 120


@contextmanager
def gateway_process(*servers: Server) -> Iterator[str]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tidewheel.cli.main", "gateway", "--port", str(port)]
    urls = [argument for one in servers for argument in ("--url", one.grpc)]
    process = subprocess.Popen([*command, *urls], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: num_ready(url) == len(servers), 60, "gateway")
        yield url
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def num_ready(url: str) -> int:
    try:
        figures = Figures.parse(requests.get(f"{url}/metrics", timeout=60).text)
    except requests.ConnectionError:
        return 0
    return int(sum(sample.value for sample in figures.samples(UPSTREAM_READY.name)))


def complete(url: str, number: int, **fields: object) -> requests.Response:
    """Return the answer, a stream's from its first token on."""
    body = {"model": "demo", "prompt": f"{number} is", "temperature": 0, **fields}
    return requests.post(f"{url}/v1/completions", json=body, stream=True, timeout=LIMIT_S)


def last_line(answer: requests.Response) -> str:
    return [line for line in answer.iter_lines(decode_unicode=True) if line][-1]


def test_streams_of_a_killed_server_end_with_an_error(server: Server, other: Server) -> None:
    with gateway_process(server, other) as url, ThreadPoolExecutor(NUM_STREAMS) as pool:
        slow_down(pace_of(other.log), 0.1)  # its streams cannot end before it does
        streams = [complete(url, n, max_tokens=800, stream=True, ignore_eos=True) for n in range(NUM_STREAMS)]
        other.triton_process().kill()
        slow_down(pace_of(other.log), 0.0)
        ends = list(pool.map(last_line, streams))
        lost = [end for end in ends if "TW-ENGINE-DEAD" in end]
        assert 0 < len(lost) < NUM_STREAMS, ends
        assert all(end == "data: [DONE]" for end in ends if end not in lost)
        assert all(complete(url, number, max_tokens=4).ok for number in range(NUM_STREAMS))
