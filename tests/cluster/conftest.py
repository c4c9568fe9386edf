"""One cluster for all tests here: two replicas of the demo model."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cluster.running_cluster import RunningCluster, up


@pytest.fixture(scope="session")
def cluster() -> Iterator[RunningCluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'tidewheel[ray]'")
    folder = Path(tempfile.mkdtemp(prefix="tw-"))  # a short path: Ray's sockets have long names
    try:
        with up(folder, "--replicas", "2", "--replica-cpus", "0.5", "--models", "demo") as running:
            running.wait_ready(2)
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)
