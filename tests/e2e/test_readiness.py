"""What a balancer is told while the engine is dead, stopped, loading again or given up. Triton itself says 200."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import requests

from support.triton.serving import REPOSITORY, Server, start_server, stop_server, wait_for, wait_ready

pytestmark = pytest.mark.e2e

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(REPOSITORY / "demo", folder / "demo")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "serve.log"
    running = start_server("--model-repository", str(repository), log=log)
    wait_for(lambda: _answers(running), LIMIT_S, "the endpoint")
    assert running.readiness() == (503, "starting")
    assert running.readiness("live") == (200, "starting")
    yield wait_ready(running)
    if running.process.poll() is None:
        stop_server(running)


def _answers(server: Server) -> bool:
    try:
        return bool(server.readiness()[0])
    except requests.ConnectionError:
        return False


def engine_of(server: Server) -> psutil.Process:
    wait_for(lambda: server.readiness() == (200, "ready"), LIMIT_S, "a ready server")
    engine = server.engine_process()
    assert engine is not None
    return engine


def told(server: Server, *states: str) -> Callable[[], bool]:
    return lambda: server.readiness()[1] in states


def triton_says(server: Server) -> int:
    return requests.get(f"{server.http}/v2/health/ready", timeout=60).status_code


def is_published(server: Server, ready: int) -> Callable[[], bool]:
    return lambda: server.metric("tidewheel_engine_ready", model="demo") == ready


def test_a_killed_engine_is_told_until_another_is_ready(server: Server) -> None:
    engine = engine_of(server)
    wait_for(is_published(server, 1), LIMIT_S, "the metric")
    engine.kill()
    wait_for(told(server, "stopped", "reloading"), LIMIT_S, "the death")
    assert triton_says(server) == 200
    assert server.readiness("live")[0] == 200
    wait_for(is_published(server, 0), LIMIT_S, "the metric")
    assert engine_of(server).pid != engine.pid
    wait_for(is_published(server, 1), LIMIT_S, "the metric")
    assert server.generate("A tuple is", max_tokens=2)["text_output"]


def test_a_stopped_engine_is_told_and_survives(server: Server) -> None:
    engine = engine_of(server)
    os.kill(engine.pid, signal.SIGSTOP)
    wait_for(told(server, "hung"), LIMIT_S, "the hang")
    assert triton_says(server) == 200
    wait_for(is_published(server, 0), LIMIT_S, "the metric")
    os.kill(engine.pid, signal.SIGCONT)
    assert engine_of(server).pid == engine.pid
    wait_for(is_published(server, 1), LIMIT_S, "the metric")


def test_an_engine_that_cannot_start_is_tried_until_it_can(server: Server, repository: Path) -> None:
    engine = engine_of(server)
    config = repository / "demo" / "1" / "weights" / "config.json"
    text = config.read_text()
    config.write_text('{"architectures": ["Unheard"]}')
    engine.kill()
    wait_for(lambda: server.readiness()[0] == 503, LIMIT_S, "the failure")
    assert server.readiness("live")[0] == 200
    config.write_text(text)
    assert engine_of(server).pid != engine.pid
