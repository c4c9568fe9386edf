"""`tidewheel top` beside the running server: its requests, and the cancel of one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from support.faults.slowed import slow_down, slowed_by
from support.top.typed_terminal import LIMIT_S, terminal
from support.triton.serving import REPOSITORY, Server, free_ports, start_server, stop_server, wait_for, wait_ready
from tidewheel.top.watch import list_here
from tidewheel_client import Client, Completion

pytestmark = pytest.mark.e2e

LONG: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True}
SECRET = "The Python interpreter is"
TOP = (sys.executable, "-m", "tidewheel.cli.main", "top")


@pytest.fixture(scope="module")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Say in a file by how many seconds each step of the engine is longer."""
    return tmp_path_factory.mktemp("pace") / "seconds"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, pace: Path) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("paced") / "serve.log"
    arguments = ("--model-repository", str(REPOSITORY), "--models", "demo,demo_infer", "--allow-faults")
    running = wait_ready(start_server(*arguments, log=log, with_gateway=True, variables=slowed_by(0.0, pace)))
    yield running
    assert stop_server(running) == 0, log.read_text()


def addresses(server: Server) -> list[str]:
    return [
        "--metrics-url", f"http://127.0.0.1:{server.metrics_port}/metrics",
        "--health-url", f"http://127.0.0.1:{server.health_port}/ready",
        "--gateway-url", f"{server.openai}/metrics",
    ]  # fmt: skip


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOP, *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as one:
        yield one


def begin(pool: ThreadPoolExecutor, server: Server, model: str, **options: Any) -> Future[Completion]:
    def generate() -> Completion:
        with Client(server.grpc, model=model, timeout_s=120) as client:
            return client.generate(SECRET, **LONG, **options)

    return pool.submit(generate)


def ask_gateway(server: Server, request_id: str) -> dict[str, Any]:
    body = {"model": "demo", "prompt": SECRET, **LONG}
    answer = requests.post(
        f"{server.openai}/v1/completions", json=body, headers={"X-Request-Id": request_id}, timeout=120
    )
    found: dict[str, Any] = answer.json()
    return found


def test_requests_of_every_front_end_are_seen_and_one_is_cancelled(
    server: Server, pace: Path, pool: ThreadPoolExecutor
) -> None:
    """A stream, an answer of the twin's front end, and one of the gateway. The terminal's keys cancel the first."""
    metrics_url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    slow_down(pace, 0.05)
    with (
        terminal(*TOP, "--interval-s", "0.2", *addresses(server)) as screen,
        Client(server.grpc, model="demo", timeout_s=120) as client,
    ):
        screen.wait_shown("requests: ")
        stream = client.stream(SECRET, tenant="acme", priority=2, **LONG)
        next(stream)
        others = [begin(pool, server, "demo_infer"), pool.submit(ask_gateway, server, "from-gateway")]
        rest = pool.submit(lambda: [*stream])
        wait_for(lambda: list_here(metrics_url, "").num_sequences == 3, 60, "all requests")
        screen.wait_shown("from-gateway")
        listed = list_here(metrics_url, "").requests or []
        screen.type("k")  # the oldest
        screen.wait_shown("of tenant acme")
        screen.type("y")
        rest.result(LIMIT_S)
        assert stream.finish_reason == "cancelled"
        slow_down(pace, 0.0)
        screen.type("q")
        assert screen.process.wait(LIMIT_S) == 0
    assert (listed[0].tenant, listed[0].priority, listed[0].state) == ("acme", "high", "running")
    assert 0 < listed[0].num_output_tokens < 1000
    assert sum(one.request_id == "from-gateway" for one in listed) == 1
    assert others[0].result(120).finish_reason == "length"
    assert others[1].result(120)["choices"][0]["finish_reason"] == "length"
    wait_for(lambda: not list_here(metrics_url, "").num_sequences, 60, "end of all requests")


def test_a_view_for_programs(server: Server) -> None:
    view = wait_for(lambda: view_of_a_stream(server), 60, "a view with steps")
    assert (view["is_ready"], view["state"], view["models"]) == (True, "ready", ["demo", "demo_infer"])
    assert view["gateway"]["open_requests"] >= 0
    assert view["steps"]["seconds_per_step"] > 0


def view_of_a_stream(server: Server) -> dict[str, Any] | None:
    """Return what `top` prints beside a stream; None if no figures of a step came between its two looks."""
    with Client(server.grpc, model="demo", timeout_s=120) as client:
        stream = client.stream(SECRET, **LONG)
        next(stream)
        done = top("--json", "--interval-s", "0.2", *addresses(server))
        stream.cancel()
    metrics_url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    wait_for(lambda: not list_here(metrics_url, "").num_sequences, 60, "its end")
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout
    view: dict[str, Any] = json.loads(done.stdout)
    return view if view["steps"]["seconds_per_step"] is not None else None


def test_a_page_without_a_terminal(server: Server) -> None:
    server.generate(SECRET, max_tokens=4)
    done = top("--once", "--interval-s", "0.3", *addresses(server))
    assert done.returncode == 0, done.stderr
    for words in ("ready", "critical", "KV cache", "requests: 0 unfinished"):
        assert words in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--once", "--model", "demi"], "model 'demi' has no figures on .*: those with figures are demo"),
        ([], "this is no terminal: use --once or --json"),
        (["--interval-s", "0"], "'0' is no time between looks: 0.2 to 60 seconds"),
    ],
)
def test_mistakes(server: Server, arguments: list[str], words: str) -> None:
    done = top(*arguments, *addresses(server))
    assert done.returncode == 2
    assert re.search(words, done.stderr.splitlines()[-1])


def test_no_server() -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/"
    done = top("--once", "--metrics-url", url, "--health-url", url)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "start a server with 'tidewheel serve'" in done.stderr
