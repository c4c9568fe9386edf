"""An engine that fails: the offender ends alone where that can be; else every client is told, and served again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from faults.conftest import Case
from support.faults.nothing_lost import (
    CANARIES,
    Recorded,
    assert_prefixes,
    assert_told,
    run_dir,
    streaming_canaries,
)
from support.faults.planted import Fault
from support.faults.service import PLANTED, make_repository
from support.triton.burst import bursting
from support.triton.serving import START_LIMIT_S, Server, has_ended, start_server, wait_for
from tidewheel.engine.folder import DEATHS

pytestmark = pytest.mark.e2e

DEAD = "TW-ENGINE-DEAD"
NUM_STREAMS = 100
HANG_LIMIT_S = 240.0


def engine_dir(server: Server) -> Path:
    (folder,) = run_dir(server).glob("*/current")
    return folder


def engine(server: Server) -> psutil.Process:
    process: psutil.Process = wait_for(server.engine_process, 180, "an engine")
    return process


@pytest.fixture
def mortal(server: Server) -> psutil.Process:
    return mortal_engine(server)


def mortal_engine(server: Server) -> psutil.Process:
    """Return an engine whose death is the first: 5 in 60 s are a crash loop."""
    (engine_dir(server) / DEATHS).unlink(missing_ok=True)
    return engine(server)


def ask(server: Server, prompt: list[int]) -> str:
    """Return the one error that a planted fault ends its request with."""
    with bursting(server, num_clients=1) as burst:
        burst.send(prompt, 100)
        burst.finish()
        (error,) = burst.errors
        return error


def test_logits_that_are_not_finite_end_their_row(server: Server, case: Case) -> None:
    with case():
        assert ask(server, Fault.NOT_FINITE.prompt(after=5)).startswith("[TW-NUMERIC]")
        assert ask(server, Fault.NOT_FINITE.prompt(after=0, length=100)).startswith("[TW-NUMERIC]")


def test_a_step_without_memory_ends_its_longest_chunk(server: Server, case: Case) -> None:
    with case():
        assert ask(server, Fault.OUT_OF_MEMORY.prompt(after=0, length=200)).startswith("[TW-INTERNAL]")


@pytest.mark.parametrize("fault", [Fault.RAISES, pytest.param(Fault.RAISES_IN_LAUNCH, marks=pytest.mark.slow)])
def test_a_step_that_raises_ends_all_and_the_next_engine_serves(
    server: Server, case: Case, mortal: psutil.Process, fault: Fault
) -> None:
    with case(ends=DEAD, log="Traceback"):
        assert ask(server, fault.prompt()).startswith(f"[{DEAD} retry_after_ms=")
        assert_told(server, "stopped", "reloading")
    assert has_ended(mortal)


def test_a_killed_engine_is_told_to_every_client_and_the_next_serves(
    server: Server, recorded: Recorded, case: Case, mortal: psutil.Process
) -> None:
    with case(ends=DEAD), bursting(server) as burst:
        for index in range(NUM_STREAMS):
            burst.send(CANARIES[index % len(CANARIES)], 900)
        # All of them at the engine: one that came after its death would be held, and served by the next engine.
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        wait_for(lambda: sum(map(server.metric, names)) >= NUM_STREAMS, 180, "all requests at the engine")
        mortal.kill()
        assert_told(server, "stopped", "reloading")
        burst.finish()
        assert len(burst.errors) == NUM_STREAMS
        assert all(error.startswith(f"[{DEAD} retry_after_ms=") for error in burst.errors)
        with streaming_canaries(server) as later:  # held until there is an engine, but not for ever
            later.finish()
            assert all(error.startswith(f"[{DEAD} retry_after_ms=") for error in later.errors)
            assert_prefixes(later, recorded)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM], ids=lambda one: one.name)
def test_signals(case: Case, mortal: psutil.Process, number: signal.Signals) -> None:
    tag = "TW-DRAINING" if number == signal.SIGTERM else DEAD
    with case(ends=tag, log="Segmentation|SIGSEGV"):
        mortal.send_signal(number)


@pytest.mark.slow
@pytest.mark.usefixtures("mortal")
def test_an_engine_that_aborts_in_a_step(server: Server, case: Case) -> None:
    with case(ends=DEAD):
        assert ask(server, Fault.ABORTS.prompt()).startswith(f"[{DEAD} retry_after_ms=")


@pytest.mark.parametrize("pause_s", [0.0, pytest.param(7.0, marks=pytest.mark.slow)])
def test_a_pause_is_survived(server: Server, case: Case, pause_s: float) -> None:
    with case() as canaries:
        paused = engine(server)
        paused.suspend()
        with bursting(server) as burst:
            for prompt in CANARIES:
                burst.send(prompt, 8)
            wait_for(lambda: paused.status() == psutil.STATUS_STOPPED, 60, "a stopped engine")
            time.sleep(pause_s)
            paused.resume()
            burst.finish()
            assert burst.errors == canaries.errors == []


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_with_its_stacks(server: Server, case: Case, mortal: psutil.Process) -> None:
    with case(ends=DEAD), bursting(server) as burst:
        burst.send(Fault.HANGS.prompt(), 100)
        assert_told(server, "hung")
        wait_for(lambda: has_ended(mortal), HANG_LIMIT_S, "its end")
        burst.finish()
        assert [error[: len(DEAD) + 1] for error in burst.errors] == [f"[{DEAD}"]
        assert "support/faults/planted.py" in (engine_dir(server) / "engine.log").read_text()


@pytest.mark.slow
def test_a_start_refuses_planted_faults(tmp_path: Path) -> None:
    arguments = ("--model-repository", str(make_repository(tmp_path)))
    server = start_server(*arguments, log=tmp_path / "serve.log", variables={"TIDEWHEEL_FAULTS": PLANTED})
    assert server.process.wait(START_LIMIT_S) == 1
    assert "cannot be loaded: TIDEWHEEL_FAULTS is" in server.log.read_text()
