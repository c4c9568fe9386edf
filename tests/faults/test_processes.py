"""Processes of a server that are killed or paused from outside."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest
import requests

from faults.conftest import Case
from support.faults.nothing_lost import (
    CANARIES,
    INHERITED_DESCRIPTORS,
    Recorded,
    assert_serves,
    assert_survived,
    record,
    shared_memory,
    shm_prefix,
    streaming_canaries,
)
from support.faults.service import serving
from support.triton.burst import bursting
from support.triton.serving import Server, has_ended, wait_for

pytestmark = pytest.mark.e2e

BACK_LIMIT_S = 180.0
PROMPT_PROCESS = "tidewheel.frontend.prompt_workers"
RECEIVED = "tidewheel_requests_received_total"


def stub_of(server: Server, model: str) -> psutil.Process:
    return server.stubs(model)[0]


def prompt_processes(server: Server) -> list[psutil.Process]:
    """Return those of `demo`, not of its twin."""
    front_end = stub_of(server, "demo").pid
    return [process for process in server.processes(PROMPT_PROCESS) if process.ppid() == front_end]


@contextmanager
def suspended(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def shared_memory_files(server: Server) -> set[tuple[str, int]]:
    """Return names and inodes of the server's regions, without the mark that outlives a start of tritonserver."""
    paths = shared_memory(server).glob(f"{shm_prefix(server)}*")
    return {(path.name, path.stat().st_ino) for path in paths if not path.name.endswith("_owner")}


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve for tests that end processes of it, fewer than are a crash loop."""
    with serving(tmp_path_factory.mktemp("mortal")) as server:
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


@pytest.mark.slow
def test_a_paused_prompt_process_delays_only_its_own(server: Server, case: Case) -> None:
    with case() as canaries, bursting(server) as burst:
        with suspended(prompt_processes(server)[:1]):
            for prompt in CANARIES:
                burst.send(prompt, 20)
            canaries.finish()
        burst.finish()
        assert burst.errors == []


def test_a_prompt_that_takes_too_long_ends_alone(server: Server, recorded: Recorded, case: Case) -> None:
    """The kernel ends its process by SIGPROF when its CPU time is up; here the test does."""
    with case(), bursting(server, num_clients=1) as burst:
        busy = prompt_processes(server)
        with suspended(busy):
            received = server.metric(RECEIVED)
            for prompt in CANARIES:
                burst.send(prompt, 20)
            wait_for(lambda: server.metric(RECEIVED) >= received + len(CANARIES), 180, "all prompts")
            for process in busy:
                process.send_signal(signal.SIGPROF)
        burst.finish()
        assert len(burst.errors) == len(busy)
        assert all("could not be tokenised within" in error for error in burst.errors), burst.errors
        served = [tokens for tokens in burst.tokens.values() if tokens]
        assert len(served) == len(CANARIES) - len(busy)
        assert all(tokens in [recorded[prompt][:20] for prompt in CANARIES] for tokens in served)


def ask_twin(server: Server, max_tokens: int) -> requests.Response:
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [CANARIES[0]]},
        {"name": "ignore_eos", "shape": [1], "datatype": "BOOL", "data": [True]},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [max_tokens]},
    ]
    return requests.post(f"{server.http}/v2/models/demo_infer/infer", json={"inputs": inputs}, timeout=BACK_LIMIT_S)


def kill_front_end(server: Server, model: str) -> None:
    """Kill it, and wait until another serves."""
    noted = server.log.read_text().count(again := f"model '{model}' is loaded again")
    stub_of(server, model).kill()
    wait_for(lambda: server.log.read_text().count(again) > noted, BACK_LIMIT_S, "another front end")
    wait_for(lambda: server.readiness() == (200, "ready"), BACK_LIMIT_S, "readiness")


def test_a_dead_twin_costs_no_stream_of_others(server: Server, case: Case) -> None:
    """Nor is an entry that was changed meanwhile loaded again."""
    others = stub_of(server, "demo")
    (server.log.parent / "repository" / "demo" / "config.pbtxt").touch()
    with case(spare_descriptors=INHERITED_DESCRIPTORS):
        kill_front_end(server, "demo_infer")
        assert ask_twin(server, 3).ok
    assert stub_of(server, "demo") == others


def test_a_dead_owner_of_the_engine_costs_its_twin_nothing(server: Server, recorded: Recorded) -> None:
    engine = server.engine_process()
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(ask_twin, server, 900) for _ in range(4)]
        wait_for(lambda: server.metric("vllm:num_requests_running") == len(answers), BACK_LIMIT_S, "running requests")
        kill_front_end(server, "demo")
        assert all(answer.result().ok for answer in answers)
    assert_serves(server, recorded)
    assert server.engine_process() == engine


@pytest.mark.slow
def test_clients_of_a_dead_twin_are_told_when_no_other_waits(mortal: Server) -> None:
    """Triton tells them nothing, so connections have to break."""
    recorded = record(mortal)
    with ThreadPoolExecutor(1) as clients, streaming_canaries(mortal) as canaries:
        answer = clients.submit(ask_twin, mortal, 900)
        wait_for(lambda: mortal.metric("vllm:num_requests_running") == len(CANARIES) + 1, BACK_LIMIT_S, "its start")
        stub_of(mortal, "demo_infer").kill()
        assert_survived(canaries, recorded)
        assert isinstance(answer.exception(BACK_LIMIT_S), requests.ConnectionError)
    wait_for(mortal.is_ready, BACK_LIMIT_S, "a server that is ready again")
    assert_serves(mortal, recorded)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda one: one.name)
def test_a_dead_front_end_is_told_and_started_again(mortal: Server, number: signal.Signals) -> None:
    """Every stream ends, with an error or with its connection; the next server leaves nothing of the last."""
    recorded, left, regions = record(mortal), mortal.descendants(), shared_memory_files(mortal)
    with bursting(mortal, num_clients=len(CANARIES)) as burst:
        for prompt in CANARIES:
            burst.send(prompt, 900)
        burst.receive_until_all_run()
        stub_of(mortal, "demo").send_signal(number)
        burst.finish()
        assert len(burst.errors) == len(CANARIES)
    wait_for(mortal.is_ready, BACK_LIMIT_S, "a server that is ready again")
    assert_serves(mortal, recorded)
    old = [process for process in left if not has_ended(process)]
    assert not any(process.name().startswith(("tritonserver", "triton_python_b")) for process in old)
    assert regions & shared_memory_files(mortal) == set()
