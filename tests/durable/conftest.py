"""An embedded Redis for each module, and a queue of its own for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tidewheel_queue import Queue


@pytest.fixture(scope="module")
def redis_folder() -> Iterator[Path]:
    from tidewheel_queue.redis_endpoint import EmbeddedRedis

    path = Path(tempfile.mkdtemp(prefix="tw-"))
    server = EmbeddedRedis(path / "queue")
    yield path / "queue"
    server.close()
    shutil.rmtree(path)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(abs(hash(request.node.nodeid)))


@pytest.fixture
def queue(redis_folder: Path, name: str) -> Iterator[Queue]:
    from tidewheel_queue import Queue

    with Queue(redis_folder, name=name) as one:
        yield one
