"""Replicas on Ray Serve: one endpoint, deaths under streams, another number of replicas, and nothing left."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest
import requests

from support.cluster.running_cluster import RunningCluster, Streamed
from support.triton.serving import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
NUM_STREAMS = 8
LONG = {"max_tokens": 800, "ignore_eos": True, "temperature": 0}


def test_two_replicas_answer_behind_one_endpoint(cluster: RunningCluster) -> None:
    answers = [cluster.chat("A tuple is", max_tokens=8, temperature=0).json() for _ in range(4)]
    assert len({one["choices"][0]["message"]["content"] for one in answers}) == 1
    assert len(cluster.tritons()) == 2
    url = f"{cluster.url}/v2/models/demo/generate"
    body = {"text_input": "A tuple is", "max_tokens": 8, "temperature": 0}
    assert set(requests.post(url, json=body, timeout=60).json()) == {"model_name", "model_version", "text_output"}
    with requests.post(f"{url}_stream", json={**body, "stream": True}, timeout=60, stream=True) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert len(lines) > 1
    assert all(line.startswith(b'data: {"model_name":"demo"') for line in lines), lines
    assert cluster.command("status").stdout.startswith("running: 2 replicas wanted, 2 running\n")
    wait_for(lambda: num_shown(cluster, 0) == 2, 60, "two replicas that were not started again")


def num_shown(cluster: RunningCluster, num_restarts: int) -> int:
    """Return how many replicas the status shows as ready after so many restarts."""
    text = cluster.command("status").stdout
    return len(
        re.findall(rf"^  127.0.0.1:\d+: ready, up \d:\d\d:\d\d, restarts {num_restarts}; ", text, re.MULTILINE)
    )


def test_a_second_cluster_is_refused_in_one_line(cluster: RunningCluster) -> None:
    done = cluster.command("up", "--models", "demo")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "a cluster of yours is up" in line
    assert cluster.is_ready(2)


def test_ray_is_closed_to_others(cluster: RunningCluster) -> None:
    """Ray lets the workers of Ray Serve's actors listen on all interfaces. They ask for the cluster's token."""
    actors = {one.pid for one in cluster.processes() if " ".join(one.cmdline()).startswith("ray::")}
    pids = {one.pid for one in cluster.processes()}
    found = [one for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.pid in pids]
    others = [one for one in found if one.pid not in actors]
    assert len(others) > 5
    assert {one.laddr.ip.removeprefix("::ffff:") for one in others} <= {"127.0.0.1", "::1"}
    for port in {one.laddr.port for one in found}:
        with contextlib.suppress(requests.RequestException):
            jobs = requests.get(f"http://127.0.0.1:{port}/api/jobs/", timeout=0.5)
            kind = jobs.headers.get("content-type", "")  # servers of metrics answer every path with a page of text
            assert not jobs.ok or "json" not in kind, f"the API of jobs, which runs any program, is at {port}"
    (token,) = cluster.run_dir.glob("cluster*/token")
    assert token.stat().st_mode & 0o777 == 0o600
    environment = cluster.replicas()[0].environ()
    assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]) == ("token", str(token))


@contextmanager
def streams(cluster: RunningCluster) -> Iterator[tuple[list[Streamed], list[Future[Streamed]]]]:
    """Begin streams that go on for seconds, on both replicas."""
    each = [Streamed() for _ in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        yield each, [pool.submit(one.read, cluster, f"{number} is", **LONG) for number, one in enumerate(each)]


@pytest.mark.parametrize(
    "victims",
    [RunningCluster.replicas, RunningCluster.tritons],
    ids=["actor", "tritonserver"],
)
def test_a_death_under_streams(
    cluster: RunningCluster, victims: Callable[[RunningCluster], list[psutil.Process]]
) -> None:
    """Its streams are told, the others end well, and what has not begun is answered."""
    cluster.wait_ready(2)
    with streams(cluster) as (each, futures):
        wait_for(lambda: all(one.text for one in each), 60, "first tokens of all streams")
        victims(cluster)[0].kill()
        killed_s = time.monotonic()
        new = [cluster.chat(f"{number} was", max_tokens=4) for number in range(4)]
        assert [one.status_code for one in new] == [200] * 4, [one.text for one in new]
        ends = [future.result() for future in futures]
    lost = [one for one in ends if one.errors]
    assert 0 < len(lost) < NUM_STREAMS
    for one in lost:
        assert one.errors[0]["error"]["tag"] in ("TW-ENGINE-DEAD", "TW-DRAINING"), one.errors
        print("told after", one.last_news_s - killed_s)
    assert all(one.is_done for one in ends if not one.errors)
    cluster.wait_ready(2)
    assert cluster.chat("A tuple is", max_tokens=4).ok
    if victims is RunningCluster.tritons:
        wait_for(lambda: num_shown(cluster, 1) == 1, 60, "a replica whose server was started again")


def test_another_number_of_replicas_cuts_nothing(cluster: RunningCluster) -> None:
    """A replica that goes ends its streams first."""
    with streams(cluster) as (each, futures):
        wait_for(lambda: all(one.text for one in each), 60, "first tokens of all streams")
        done = cluster.command("scale", "1")
        assert done.returncode == 0, done.stderr
        ends = [future.result() for future in futures]
    assert all(one.is_done and not one.errors for one in ends), [one.errors for one in ends]
    cluster.wait_ready(1)
    wait_for(lambda: len(cluster.tritons()) == 1, 60, "end of a replica")
    done = cluster.command("scale", "9")
    assert done.returncode == 2
    assert "9 replicas need 4.5 CPUs" in done.stderr
    assert cluster.is_ready(1)


def test_down_leaves_nothing(cluster: RunningCluster) -> None:
    """Last: it ends the cluster of all tests."""
    ports = cluster.listening()
    assert len(ports) > 5
    done = cluster.command("down")
    assert done.returncode == 0, done.stderr
    assert cluster.processes() == []
    assert not set(ports) & {one.laddr.port for one in psutil.net_connections("tcp") if one.status == "LISTEN"}
    assert list(cluster.run_dir.iterdir()) == []
    done = cluster.command("down")
    assert done.returncode == 2
    assert "no cluster of yours is up" in done.stderr
