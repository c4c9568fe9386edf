"""Disks that are full or lose files: serving goes on, and heals when the disk does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.faults.nothing_lost import CANARIES, Logs, assert_serves, nothing_lost, record
from support.faults.own_mounts import may_mount, with_mounts
from support.faults.service import SETTINGS, serving
from support.triton.burst import bursting
from support.triton.serving import WEIGHTS, Server, StreamError, grpc_inputs, grpc_stream, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LIMIT_S = 60.0
SHARED_MEMORY_MB = 64


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


@pytest.mark.skipif(not may_mount(), reason="this user may mount nothing")
def test_shared_memory_that_is_full(tmp_path: Path) -> None:
    """Large prompts do not fit: their requests end, small ones are served."""
    with serving(tmp_path, prefix=with_mounts({"/dev/shm": SHARED_MEMORY_MB})) as server:
        recorded = record(server)
        with nothing_lost(server, recorded, spare_bytes=256 << 20), bursting(server, num_clients=1) as burst:
            for _ in range(4):
                burst.send("x" * (SHARED_MEMORY_MB << 20), 4)
            burst.finish()
            assert len(burst.errors) == 4
        assert_serves(server, recorded)
