"""Disks that are full or lose files: serving goes on, and heals when the disk does."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.faults.nothing_lost import (
    CANARIES,
    Logs,
    Recorded,
    assert_survived,
    nothing_lost,
    record,
    run_dir,
    streaming_canaries,
)
from support.faults.own_mounts import OwnMount, may_mount, with_mounts
from support.faults.service import SETTINGS, serving
from support.triton.burst import bursting
from support.triton.serving import WEIGHTS, Server, StreamError, grpc_inputs, grpc_stream, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LIMIT_S = 60.0
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_MB = 96  # two front ends take 16 each
RUN_DIR_MB = 16
LARGE_BYTES = 20 << 20


def kill_engine(server: Server) -> None:
    engine = server.engine_process()
    assert engine is not None
    engine.kill()


def ask(server: Server) -> str:
    """Return the error of a request, or nothing."""
    try:
        grpc_stream(server, grpc_inputs(CANARIES[0], max_tokens=4))
    except StreamError as error:
        return str(error)
    return ""


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    """`/dev/full` takes no byte."""
    with serving(tmp_path, "--log-file", "/dev/full") as server:
        recorded = record(server)
        with nothing_lost(server, recorded):
            assert ask(server) == ""
        assert "the log file cannot be written" in server.log.read_text()


def test_weights_that_are_away_for_one_reload(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(WEIGHTS, weights)
    with serving(tmp_path, settings={**SETTINGS, "model": str(weights)}) as server:
        recorded = record(server)
        with nothing_lost(server, recorded, ends="TW-ENGINE-DEAD", log="Traceback"):
            weights.rename(tmp_path / "away")
            logs = Logs(server)
            kill_engine(server)
            wait_for(lambda: "cannot start" in logs.text(), LIMIT_S, "a failed load")
            (tmp_path / "away").rename(weights)
            wait_for(lambda: not ask(server), LIMIT_S, "an answer")


needs_mount = pytest.mark.skipif(not may_mount(), reason="this user may mount nothing")


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve with a small /dev/shm, and with a small file system for the run directory."""
    with tempfile.TemporaryDirectory(prefix="tw-") as run:  # a short path, for unix sockets
        folder = tmp_path_factory.mktemp("cramped")
        prefix = with_mounts({SHARED_MEMORY: SHARED_MEMORY_MB, run: RUN_DIR_MB})
        with serving(folder, prefix=prefix, variables={"TIDEWHEEL_RUN_DIR": run}) as server:
            yield server


@pytest.fixture(scope="module")
def tokens(cramped: Server) -> Recorded:
    return record(cramped)


@contextmanager
def filled(server: Server, folder: str) -> Iterator[None]:
    """Leave no room in a file system that only the server has."""
    with OwnMount(server, folder) as mount:
        mount.fill()
        try:
            yield
        finally:
            mount.free()


@needs_mount
def test_prompts_that_shared_memory_cannot_hold(cramped: Server, tokens: Recorded) -> None:
    """Their requests end, small ones are served."""
    with nothing_lost(cramped, tokens, spare_bytes=256 << 20), bursting(cramped, num_clients=1) as burst:
        for _ in range(4):
            burst.send("x" * (SHARED_MEMORY_MB << 20), 4)
        burst.finish()
        assert len(burst.errors) == 4


@needs_mount
def test_shared_memory_that_fills_up_under_requests(cramped: Server, tokens: Recorded) -> None:
    """What the server has is enough for small requests. A large one ends; with room again, it gets our answer."""
    large = "x" * LARGE_BYTES
    with nothing_lost(cramped, tokens, spare_bytes=256 << 20), bursting(cramped, num_clients=1) as burst:
        with filled(cramped, SHARED_MEMORY):
            burst.send(large, 4)
            burst.finish()
            assert "shared memory" in burst.errors.pop()
            with streaming_canaries(cramped) as beside:
                assert_survived(beside, tokens)
        burst.send(large, 4)
        burst.finish()
        assert burst.errors.pop().startswith("[TW-TOO-LARGE]")


@needs_mount
def test_a_run_directory_that_is_full_while_it_serves(cramped: Server, tokens: Recorded) -> None:
    with nothing_lost(cramped, tokens), filled(cramped, str(run_dir(cramped))):
        with streaming_canaries(cramped) as beside:
            assert_survived(beside, tokens)
        assert cramped.readiness() == (200, "ready")


@needs_mount
def test_an_engine_that_dies_while_its_run_directory_is_full(cramped: Server, tokens: Recorded) -> None:
    with nothing_lost(cramped, tokens, ends="TW-ENGINE-DEAD"):
        with filled(cramped, str(run_dir(cramped))):
            kill_engine(cramped)
            wait_for(lambda: "cannot be written (No space left on device): make room" in ask(cramped), LIMIT_S, "why")
        wait_for(lambda: not ask(cramped), LIMIT_S, "an answer")
