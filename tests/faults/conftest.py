"""One server for all faults that it survives, and the tokens of its greedy streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import pytest

from support.faults.nothing_lost import Recorded, nothing_lost, record
from support.faults.service import serving
from support.triton.burst import Burst
from support.triton.serving import Server

Case = Callable[..., AbstractContextManager[Burst]]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("faults")) as running:
        yield running


@pytest.fixture(scope="session")
def recorded(server: Server) -> Recorded:
    return record(server)


@pytest.fixture
def case(server: Server, recorded: Recorded) -> Case:
    """Return `nothing_lost` for the shared server."""
    return partial(nothing_lost, server, recorded)
