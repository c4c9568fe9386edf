"""Disks, shared memory and descriptors that run out, and files that are lost: serving goes on, and heals."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
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
from support.faults.raw_streams import RawStream, idle_connections
from support.faults.service import SETTINGS, serving
from support.triton.burst import bursting
from support.triton.serving import WEIGHTS, Server, StreamError, grpc_inputs, grpc_stream, wait_for

is_possible = may_mount() and shutil.which("prlimit") is not None
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not is_possible, reason="needs prlimit, and a user who may mount"),
]

LIMIT_S = 180.0
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_MB = 96  # two front ends take 16 each
RUN_DIR_MB = 16
NUM_DESCRIPTORS = 128
REQUEST_LOG = "requests"  # folder
LARGE_BYTES = 20 << 20
FULL = "cannot be written (No space left on device): make room"


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


@contextmanager
def logged_answers(server: Server) -> Iterator[Callable[[], str]]:
    """Ask again and again, and print what was said when the block fails."""
    counts: Counter[str] = Counter()

    def answer() -> str:
        counts[said := ask(server)] += 1
        return said

    try:
        yield answer
    except BaseException:
        print(counts)
        raise


@pytest.fixture(scope="module")
def cramped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve where everything is scarce: no log can be written, and what a test may fill up is small."""
    with tempfile.TemporaryDirectory(prefix="tw-") as run:  # a short path, for unix sockets
        folder = tmp_path_factory.mktemp("cramped")
        shutil.copytree(WEIGHTS, folder / "weights")
        (folder / REQUEST_LOG).mkdir()
        mounts = with_mounts({str(SHARED_MEMORY): SHARED_MEMORY_MB, run: RUN_DIR_MB, str(folder / REQUEST_LOG): 1})
        limits = ("prlimit", f"--nofile={NUM_DESCRIPTORS}:{NUM_DESCRIPTORS}")
        settings = {**SETTINGS, "model": str(folder / "weights")}
        settings["request_log"] = str(folder / REQUEST_LOG / "requests.log")
        variables = {"TIDEWHEEL_RUN_DIR": run}
        arguments = ("--log-file", "/dev/full")  # takes no byte
        with serving(folder, *arguments, settings=settings, prefix=(*mounts, *limits), variables=variables) as server:
            yield server


@pytest.fixture(scope="module")
def tokens(cramped: Server) -> Recorded:
    return record(cramped)


@contextmanager
def filled(server: Server, folder: Path) -> Iterator[OwnMount]:
    """Leave no room in a file system that only the server has."""
    with OwnMount(server, str(folder)) as mount:
        mount.fill()
        try:
            yield mount
        finally:
            mount.free()


def test_a_log_that_cannot_be_written(cramped: Server, tokens: Recorded) -> None:
    with nothing_lost(cramped, tokens):
        assert ask(cramped) == ""
    assert "the log file cannot be written" in cramped.log.read_text()


def test_clients_beyond_the_open_files_wait_and_are_served(cramped: Server, tokens: Recorded) -> None:
    """Triton accepts no connection without a descriptor, and says nothing to its client."""
    assert f"warning: {NUM_DESCRIPTORS} open files are allowed" in cramped.log.read_text()
    with nothing_lost(cramped, tokens) as canaries:
        with idle_connections(cramped, 2 * NUM_DESCRIPTORS):
            late = RawStream(cramped, CANARIES[0], 20)
            canaries.finish()
            assert cramped.readiness("live")[0] == 200
        assert late.finish() == tokens[CANARIES[0]][:20]


def test_a_full_disk_costs_lines_of_the_request_log(cramped: Server, tokens: Recorded) -> None:
    with nothing_lost(cramped, tokens), filled(cramped, cramped.log.parent / REQUEST_LOG) as mount:
        assert mount.logs().endswith("}\n")
        with streaming_canaries(cramped) as beside:
            assert_survived(beside, tokens)
        wait_for(lambda: not mount.logs().endswith("}\n") or ask(cramped), LIMIT_S, "a line that does not fit")
        mount.free()
        num_lines = mount.logs().count("\n")

        def is_written() -> bool:
            return not ask(cramped) and mount.logs().count("\n") > num_lines

        wait_for(is_written, LIMIT_S, "lines again")
        assert json.loads(mount.logs().splitlines()[-1])["finish_reason"] == "length"
        mount.fill()


def test_weights_that_are_away_for_one_reload(cramped: Server, tokens: Recorded) -> None:
    weights, away = (cramped.log.parent / name for name in ("weights", "away"))
    with nothing_lost(cramped, tokens, ends="TW-ENGINE-DEAD", log="Traceback"):
        weights.rename(away)
        logs = Logs(cramped)
        kill_engine(cramped)
        try:
            wait_for(lambda: "cannot start" in logs.text(), LIMIT_S, "a failed load")
        finally:
            away.rename(weights)
        wait_for(lambda: not ask(cramped), LIMIT_S, "an answer")


def test_prompts_that_shared_memory_cannot_hold(cramped: Server, tokens: Recorded) -> None:
    """Their requests end, small ones are served."""
    with nothing_lost(cramped, tokens, spare_bytes=256 << 20), bursting(cramped, num_clients=1) as burst:
        for _ in range(4):
            burst.send("x" * (SHARED_MEMORY_MB << 20), 4)
        burst.finish()
        assert len(burst.errors) == 4


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


def test_a_run_directory_that_is_full_while_it_serves(cramped: Server, tokens: Recorded) -> None:
    with nothing_lost(cramped, tokens), filled(cramped, run_dir(cramped)):
        with streaming_canaries(cramped) as beside:
            assert_survived(beside, tokens)
        assert cramped.readiness() == (200, "ready")


def test_an_engine_that_dies_while_its_run_directory_is_full(cramped: Server, tokens: Recorded) -> None:
    """A few pages that a process gives back are enough for a new engine, so what gets free is taken at once."""
    with nothing_lost(cramped, tokens, ends="TW-ENGINE-DEAD"):
        with filled(cramped, run_dir(cramped)) as mount, logged_answers(cramped) as answers:
            kill_engine(cramped)

            def is_told() -> bool:
                mount.fill()
                if not (said := answers()):
                    kill_engine(cramped)
                return FULL in said

            wait_for(is_told, LIMIT_S, "why")
        wait_for(lambda: not ask(cramped), LIMIT_S, "an answer")
