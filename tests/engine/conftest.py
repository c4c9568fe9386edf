from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.engine.engine_clients import LIMIT_S, Client
from tidewheel.engine.launcher import stop_engine


@pytest.fixture
def folder() -> Iterator[Path]:
    """An engine folder with a name short enough for a socket; whatever runs in it ends with the test."""
    path = Path(tempfile.mkdtemp(prefix="tw-"))
    yield path
    stop_engine(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def connect(folder: Path) -> Iterator[Callable[..., Client]]:
    """Makes clients of the folder's engine, started unless told otherwise."""
    clients: list[Client] = []

    def make(*, start: bool = True, **arguments: object) -> Client:
        client = Client(folder, name=f"client-{len(clients)}", **arguments)
        clients.append(client)
        if start:
            client.start(LIMIT_S)
        return client

    yield make
    for client in clients:
        client.close()
