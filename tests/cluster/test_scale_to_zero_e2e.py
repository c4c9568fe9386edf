"""A cluster without replicas while nothing is asked: the first requests wait for one."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.cluster.running_cluster import RunningCluster, up
from support.triton.serving import wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'tidewheel[ray]'"),
]
ON_WISH = ("--replicas", "0:1", "--replica-cpus", "0.5", "--models", "demo", "--patience-s", "100")
SOON = (
    "--scaling-set",
    "idle_to_zero_s=8",
    "--scaling-set",
    "cool_down_s=0",
    "--scaling-set",
    "scale_down_after_s=0",
)
NUM_REQUESTS = 4
LIMIT_S = 120.0


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    folder = Path(tempfile.mkdtemp(prefix="tw-"))
    with up(folder, *ON_WISH, *SOON) as one:
        assert one.chat("A tuple is", max_tokens=4).ok
        yield one
    shutil.rmtree(folder, ignore_errors=True)


def wait_empty(cluster: RunningCluster) -> None:
    wait_for(lambda: cluster.is_ready(0) and not cluster.tritons(), LIMIT_S, "end of the only replica")


def test_the_first_requests_start_a_replica_and_wait_for_it(cluster: RunningCluster) -> None:
    wait_empty(cluster)
    assert cluster.session.get(f"{cluster.url}/health").status_code == 200, "nothing is wrong"
    assert [one["id"] for one in cluster.session.get(f"{cluster.url}/v1/models").json()["data"]] == ["demo"]
    assert "0 to 1 replicas wanted" in cluster.command("status").stdout
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda number: cluster.chat(f"{number} is", max_tokens=4), range(NUM_REQUESTS)))
    assert [one.status_code for one in answers] == [200] * NUM_REQUESTS, [one.text for one in answers]
    wait_empty(cluster)
    late = cluster.chat("A tuple is", max_tokens=4, deadline_ms=200)
    assert late.status_code == 503, late.text
    assert "no server of model 'demo' is ready" in late.json()["error"]["message"]


def test_a_gateway_that_has_seen_no_replica_takes_requests(cluster: RunningCluster) -> None:
    wait_empty(cluster)
    (gateway,) = cluster.processes("ray::ServeReplica:tidewheel:gateway")
    gateway.kill()
    wait_for(lambda: not gateway.is_running() and cluster.is_ready(0), LIMIT_S, "another gateway")
    answer = cluster.chat("A tuple is", max_tokens=4)
    assert answer.ok, answer.text
