"""Rarer deaths, and starts that fail: each has a cluster of its own."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from support.cluster.running_cluster import RunningCluster, Streamed, up
from support.triton.serving import has_ended, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'tidewheel[ray]'"),
]
ONE = ("--replicas", "1", "--replica-cpus", "0.5", "--models", "demo")


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tw-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_a_killed_ray_is_told_and_in_the_way_of_no_other(folder: Path) -> None:
    with up(folder, *ONE) as cluster:
        cluster.wait_ready(1)
        below = cluster.processes()
        ports = cluster.listening()
        (store,) = cluster.processes("gcs_server")
        (ray,) = store.parents()[:1]
        ray.kill()
        wait_for(lambda: all(map(has_ended, below)), 60, "end of all")
        assert not set(ports) & {one.laddr.port for one in psutil.net_connections("tcp") if one.status == "LISTEN"}
        assert "no cluster of yours is up: Ray has ended" in cluster.command("status").stderr
        with up(folder, *ONE) as another:
            assert another.chat("A tuple is", max_tokens=4).ok
    assert list(folder.iterdir()) == []


def test_a_killed_gateway_comes_back_on_its_port(folder: Path) -> None:
    with up(folder, *ONE) as cluster:
        cluster.wait_ready(1)
        (gateway,) = cluster.processes("ray::ServeReplica:tidewheel:gateway")
        gateway.kill()
        wait_for(lambda: has_ended(gateway), 60, "its end")
        cluster.wait_ready(1)
        assert cluster.chat("A tuple is", max_tokens=4).ok


@pytest.mark.parametrize("name", ["raylet/raylet", "gcs_server"])
def test_a_cluster_without_ray_says_so_and_leaves_nothing(folder: Path, name: str) -> None:
    """Nothing starts the raylet or the store of state again: Ray ends, and replicas and gateway with it."""
    with up(folder, *ONE) as cluster, ThreadPoolExecutor(1) as pool:
        cluster.wait_ready(1)
        ports = cluster.listening()
        stream = Streamed()
        future = pool.submit(stream.read, cluster, "0 is", max_tokens=400, ignore_eos=True, temperature=0)
        wait_for(lambda: bool(stream.text), 60, "its first token")
        (victim,) = cluster.processes(name)
        victim.kill()
        word = name.rpartition("/")[2]
        wait_for(lambda: f"Ray's {word} died" in cluster.command("status").stderr, 120, "the news")
        told = cluster.command("scale", "2")
        assert (told.returncode, len(told.stderr.splitlines())) == (2, 1), told.stderr
        end = future.result()
        assert end.is_done or end.errors or end.is_broken, end
        done = cluster.command("down")
        assert done.returncode == 0, done.stderr
        assert cluster.processes() == []
        assert list(folder.iterdir()) == []
        assert not set(ports) & {one.laddr.port for one in psutil.net_connections("tcp") if one.status == "LISTEN"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_a_start_that_is_ended(folder: Path, number: signal.Signals) -> None:
    cluster = RunningCluster(folder)
    with cluster.begin("up", "--openai-port", "0", *ONE) as begun:
        wait_for(lambda: bool(cluster.processes("raylet/raylet")), 60, "Ray")
        begun.send_signal(number)
        assert begun.wait(60) == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert cluster.processes() == []
        assert list(folder.iterdir()) == []
    with up(folder, *ONE) as another:
        assert another.chat("A tuple is", max_tokens=4).ok


def test_the_controller_is_started_again(folder: Path) -> None:
    """It carries no stream; afterwards the cluster can be changed as before."""
    with up(folder, *ONE) as cluster, ThreadPoolExecutor(1) as pool:
        cluster.wait_ready(1)
        (server,) = cluster.tritons()
        stream = Streamed()
        future = pool.submit(stream.read, cluster, "0 is", max_tokens=400, ignore_eos=True, temperature=0)
        wait_for(lambda: bool(stream.text), 60, "its first token")
        (controller,) = cluster.processes("ray::ServeController")
        controller.kill()
        assert cluster.chat("A tuple is", max_tokens=4).ok
        assert future.result().is_done, stream
        wait_for(lambda: cluster.command("scale", "2").returncode == 0, 60, "another controller")
        cluster.wait_ready(2)
        assert server.is_running(), "its replica stays"


def test_requests_wait_for_the_only_replica(folder: Path) -> None:
    with up(folder, *ONE, "--patience-s", "300") as cluster:  # a busy machine takes longer than the usual patience
        cluster.wait_ready(1)
        cluster.replicas()[0].kill()
        waited = cluster.chat("A tuple is", max_tokens=4)
        assert waited.ok, waited.text
        late = cluster.chat("A tuple is", max_tokens=4, deadline_ms=300_000)
        assert late.ok, late.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--replicas", "1000"), "1000 replicas need 1000 CPUs, and there are"),
        (("--replica-gpus", "1"), "1 replicas need 1 GPUs, and there are 0"),
        (("--model", "/no/such/folder"), "no such folder"),
    ],
    ids=["cpus", "gpus", "model"],
)
def test_what_cannot_start_is_one_line(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    cluster = RunningCluster(folder)
    done = cluster.command("up", "--openai-port", "0", *arguments)
    assert done.returncode == 2
    (line,) = (
        line for line in done.stderr.splitlines() if not line.startswith(("tidewheel: starting", "  starting"))
    )
    assert words in line
    assert cluster.processes() == []
    assert list(folder.iterdir()) == []
