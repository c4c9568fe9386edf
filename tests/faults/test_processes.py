"""Processes of a server that are killed or paused from outside."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from faults.conftest import Case
from support.faults.nothing_lost import CANARIES, Recorded, assert_survived, shm_prefix, streaming_canaries
from support.faults.service import serving
from support.triton.burst import bursting
from support.triton.serving import Server, has_ended, wait_for

pytestmark = pytest.mark.e2e

TOLD_LIMIT_S = 30.0
BACK_LIMIT_S = 60.0
NO_RESTART = "serve ends its group when a front end dies; it does not start it again yet"
PROMPT_PROCESS = "tidewheel.frontend.prompt_process"


def stub_of(server: Server, model: str) -> psutil.Process:
    stubs = server.processes("triton_python_backend_stub")
    return next(stub for stub in stubs if f"/{model}/" in " ".join(stub.cmdline()))


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Server]:
    """Serve for one test, which may end it."""
    with serving(tmp_path) as server:
        yield server


def test_killed_prompt_processes_are_replaced(server: Server, recorded: Recorded, case: Case) -> None:
    with case():
        for process in server.processes(PROMPT_PROCESS):
            process.kill()
        with bursting(server) as burst:
            for prompt in CANARIES:
                burst.send(prompt, 20)
            burst.finish()
            assert all(error.startswith("[TW-INTERNAL]") for error in burst.errors), burst.errors
        with streaming_canaries(server) as later:
            assert_survived(later, recorded)


def test_a_paused_prompt_process_delays_only_its_own(server: Server, case: Case) -> None:
    with case() as canaries:
        paused = server.processes(PROMPT_PROCESS)[0]
        paused.suspend()
        try:
            with bursting(server) as burst:
                for prompt in CANARIES:
                    burst.send(prompt, 20)
                canaries.finish()
                paused.resume()
                burst.finish()
                assert burst.errors == []
        finally:
            paused.resume()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda one: one.name)
def test_a_dead_front_end_is_told_and_leaves_nothing(mortal: Server, number: signal.Signals) -> None:
    """Every stream ends, with an error or with its connection."""
    prefix = shm_prefix(mortal)
    left = mortal.descendants()
    with bursting(mortal, num_clients=len(CANARIES)) as burst:
        for prompt in CANARIES:
            burst.send(prompt, 900)
        burst.receive_until_all_run()
        stub_of(mortal, "demo").send_signal(number)
        burst.finish()
        assert len(burst.errors) == len(CANARIES)
    assert mortal.process.wait(TOLD_LIMIT_S) == 1
    wait_for(lambda: all(map(has_ended, left)), TOLD_LIMIT_S, "the end of its processes")
    assert list(Path("/dev/shm").glob(f"{prefix}*")) == []


@pytest.mark.slow
@pytest.mark.xfail(reason=NO_RESTART, strict=True)
def test_a_dead_front_end_is_started_again(mortal: Server) -> None:
    stub_of(mortal, "demo").kill()

    def is_back() -> bool:
        assert mortal.process.poll() is None, "the server ended"
        return mortal.is_ready()

    wait_for(lambda: not mortal.is_ready(), TOLD_LIMIT_S, "a server that is not ready")
    wait_for(is_back, BACK_LIMIT_S, "a server that is ready again")
    assert mortal.generate(CANARIES[0], temperature=0.0)["text_output"]
