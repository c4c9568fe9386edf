"""`tidewheel serve` and `demo` with the demo model: engines start, drain and end with the server."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

import tidewheel_client as tc
from support.faults.nothing_lost import shared_memory, shm_prefix
from support.faults.slowed import pace_of, slow_down, slowed_by
from support.triton.serving import (
    REPOSITORY,
    WEIGHTS,
    Server,
    StreamError,
    grpc_inputs,
    grpc_stream,
    has_ended,
    start_server,
    stop_server,
    wait_for,
    wait_ready,
)
from tidewheel.private_dir import RUN_DIR
from tidewheel.server.model_reloads import MAX_SHARED_BYTES
from tidewheel.settings import MIB
from tidewheel_client import Client

pytestmark = pytest.mark.e2e

STOP_LIMIT_S = 120.0
RESTART_LIMIT_S = 120.0
GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
LONGER = 900
SLOW_STEP_S = 0.1  # a long request takes 100 s of them, and an engine answers between two
LONG = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0.0}


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """The temporary and the run directory of a server; its path is short, for unix sockets lie below it."""
    path = Path(tempfile.mkdtemp(prefix="tw"))
    (path / "tmp").mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TMPDIR", RUN_DIR):
            patch.setenv(name, str(path / "tmp"))
        yield path
    shutil.rmtree(path)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def serve(folder: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> Server:
    settings = (
        "--set",
        "max_num_seqs=4",
        "--set",
        "num_blocks=256",
        "--set",
        "num_threads=1",
        "--set",
        "dtype=float32",
    )
    command = ("--model", str(WEIGHTS), "--model-name", "mine", *settings, *arguments)
    server = wait_ready(start_server(*command, log=folder / "log", variables=variables))
    wait_for(lambda: "Ctrl-C ends the server" in server.log.read_text(), 60, "the report")
    return server


def serve_paced(folder: Path, *arguments: str) -> Server:
    """Serve as usual until `slow_down(pace_of(server.log), SLOW_STEP_S)`, which keeps long requests from ending."""
    return serve(folder, "--allow-faults", *arguments, variables=slowed_by(0.0, pace_of(folder / "log")))


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """For tests that leave it as it was. glibc gives freed memory back at once, so what is left is kept by Triton."""
    with short_folder() as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
        running = serve_paced(path)
        yield running
        assert stop_server(running) == 0


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    """For tests that end it."""
    running = serve_paced(folder, "--drain-s", "120")
    yield running
    if running.process.poll() is None:
        stop_server(running)


def connect(server: Server) -> Client:
    return Client(server.grpc, "mine", timeout_s=120)


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if not has_ended(process)]


def ready_page(server: Server) -> dict[str, Any]:
    page: dict[str, Any] = requests.get(f"http://127.0.0.1:{server.health_port}/ready", timeout=60).json()
    return page


def top(server: Server, how: str) -> str:
    metrics, ready = (
        f"http://127.0.0.1:{server.metrics_port}/metrics", f"http://127.0.0.1:{server.health_port}/ready",
    )  # fmt: skip
    command = [sys.executable, "-m", "tidewheel.cli.main", "top", how, "--interval-s", "0.2"]
    command += ["--metrics-url", metrics, "--health-url", ready]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_two_ranks_serve_as_one_and_come_back_together(shared: Server, folder: Path) -> None:
    with connect(shared) as client:
        expected = client.generate("A tuple is", return_token_ids=True, **GREEDY).token_ids
    server = serve(folder, "--set", "tensor_parallel_size=2")
    try:
        ranks = server.processes("tidewheel.runner.rank_group")
        assert len(ranks) == 1
        assert ready_page(server)["ranks"] == {"mine": ["cpu", "cpu"]}
        view = json.loads(top(server, "--json"))
        pids = [rank["pid"] for rank in view["ranks"]]
        assert len(pids) == 2 and pids[1] == ranks[0].pid
        assert all(rank["memory_bytes"] > MIB for rank in view["ranks"])
        assert "2 ranks" in top(server, "--once")
        with connect(server) as client:
            assert client.generate("A tuple is", return_token_ids=True, **GREEDY).token_ids == expected
        ranks[0].kill()
        wait_for(lambda: server.readiness()[0] != 200, 30, "the end of the engine")
        wait_for(lambda: server.readiness()[0] == 200, 120, "the engine's return")
        assert ready_page(server)["ranks"] == {"mine": ["cpu", "cpu"]}
        with connect(server) as client:
            assert client.generate("A tuple is", return_token_ids=True, **GREEDY).token_ids == expected
        processes = server.descendants()
    finally:
        assert stop_server(server) == 0
    assert left(processes) == []


def test_a_folder_is_served_with_its_twin(shared: Server) -> None:
    with connect(shared) as client:
        answer = client.generate("A tuple is", return_token_ids=True, **GREEDY)
        chunks = list(client.stream("A tuple is", return_token_ids=True, **GREEDY))
        assert client.streaming_models() == ("mine",)
        client.model = "mine_infer"
        assert client.generate("A tuple is", **GREEDY).text == answer.text
    assert answer.num_output_tokens == 8
    assert answer.token_ids is not None
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert [i for chunk in chunks for i in chunk.token_ids or ()] == list(answer.token_ids)


def test_the_report(shared: Server) -> None:
    output = shared.log.read_text()
    for part in (
        "mine: LlamaForCausalLM, float32, on cpu",
        "256 blocks of 16 tokens",
        "CPU KV cache size: 4,096 tokens",
        "Maximum concurrency for 1,024 tokens per request: 4.00x",
        "mine_infer: the engine of mine",
        f"tidewheel generate --url {shared.grpc} --model mine",
    ):
        assert part in output


def test_errors_carry_their_tags(shared: Server) -> None:
    with connect(shared) as client:
        with pytest.raises(tc.InvalidRequest, match="temperature"):
            client.generate("x", temprature=1)
        with pytest.raises(tc.InvalidRequest, match="max_tokens is 0"):
            client.generate("x", max_tokens=0)
        client.model = "nobody"
        with pytest.raises(tc.NotFound):
            client.generate("x")


def test_refused_prompts_are_not_kept(shared: Server) -> None:
    """Triton would keep the memory of the last eight requests of each kind."""
    size, count = 16 << 20, 6
    before = private_bytes(shared)
    with grpcclient.InferenceServerClient(shared.grpc) as client:
        for _ in range(count):
            with pytest.raises(InferenceServerException, match="TW-TOO-LARGE"):
                client.infer("mine_infer", grpc_inputs("x" * size))
    for _ in range(count):
        with pytest.raises(StreamError, match="TW-TOO-LARGE"):
            grpc_stream(shared, grpc_inputs("x" * size), model="mine")
    wait_for(lambda: private_bytes(shared) - before < count * size, RESTART_LIMIT_S, "the memory")


def private_bytes(server: Server) -> int:
    """Return the memory of tritonserver without pages that it shares."""
    memory = server.triton_process().memory_info()
    return memory.rss - memory.shared


def shared_bytes(server: Server) -> int:
    return sum(path.stat().st_blocks * 512 for path in shared_memory(server).glob(f"{shm_prefix(server)}*"))


def test_grown_shared_memory_is_given_back_while_requests_run(shared: Server) -> None:
    before, old = shared_bytes(shared), front_end(shared)
    with connect(shared) as client:
        slow_down(pace_of(shared.log), SLOW_STEP_S)
        stream = client.stream("A tuple is", **LONG)
        next(stream)
        with pytest.raises(StreamError, match="TW-TOO-LARGE"):
            grpc_stream(shared, grpc_inputs("x" * (MAX_SHARED_BYTES + 1)), model="mine")
        wait_for(
            lambda: "of shared memory; loading it again" in shared.log.read_text(), RESTART_LIMIT_S, "the notice"
        )
        slow_down(pace_of(shared.log), 0.0)
        assert stream.read().finish_reason == "length"
        wait_for(lambda: has_ended(old), RESTART_LIMIT_S, "the end of the old front end")
        assert client.generate("x", max_tokens=1).finish_reason == "length"
    wait_for(lambda: shared_bytes(shared) <= before, RESTART_LIMIT_S, "the memory")


def test_a_temporary_directory_with_a_long_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets of engine and gateway lie below a folder with a short name."""
    long = folder / ("t" * (89 - len(str(folder))))
    long.mkdir()
    monkeypatch.delenv(RUN_DIR)
    monkeypatch.setenv("TMPDIR", str(long))
    running = serve(folder, "--openai-port=0", "--openai-workers=2")
    try:
        with connect(running) as client:
            assert client.generate("x", max_tokens=1).finish_reason == "length"
    finally:
        assert stop_server(running) == 0


def test_ctrl_c_ends_the_engine_too_whatever_is_connected(server: Server, folder: Path) -> None:
    processes = server.descendants()
    assert server.engine_process() is not None
    idle = [requests.Session() for _ in range(50)]
    for session in idle:
        assert session.get(f"{server.http}/v2/health/ready").ok
    with connect(server) as client:
        client.generate("x", max_tokens=2)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(STOP_LIMIT_S) == 0  # Triton waits for connections as long as it may
    assert left(processes) == []
    assert list((folder / "tmp").iterdir()) == []


def test_a_running_request_ends_and_new_ones_are_refused(server: Server) -> None:
    """Triton alone would call the model unknown. The request cannot end before new ones are refused."""
    slow_down(pace_of(server.log), SLOW_STEP_S)
    with connect(server) as client:
        stream = client.stream("A tuple is", **LONG | {"max_tokens": LONGER})
        num_tokens = next(stream).num_output_tokens or 0
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.readiness() == (503, "draining"), 60, "the notice to balancers")
        wait_for(lambda: _is_refused(client), 60, "end of admission")
        for chunk in itertools.islice(stream, 3):
            num_tokens += chunk.num_output_tokens or 0
            with pytest.raises(tc.Draining):
                client.generate("x", max_tokens=1)
        slow_down(pace_of(server.log), 0.0)
        rest = stream.read()
        assert rest.finish_reason == "length"
        assert num_tokens + (rest.num_output_tokens or 0) == LONGER
    assert server.process.wait(STOP_LIMIT_S) == 0


def _is_refused(client: Client) -> bool:
    try:
        client.generate("x", max_tokens=1)
    except tc.Draining:
        return True
    return False


def test_what_runs_past_the_limit_is_told(folder: Path) -> None:
    server = serve_paced(folder, "--drain-s", "0.2")
    processes = server.descendants()
    slow_down(pace_of(server.log), SLOW_STEP_S)
    with connect(server) as client:
        streams = [client.stream("A tuple is", **LONG) for _ in range(4)]
        for stream in streams:
            next(stream)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            with pytest.raises(tc.Draining):
                stream.read()
    assert server.process.wait(STOP_LIMIT_S) == 0
    assert left(processes) == []


def front_end(server: Server) -> psutil.Process:
    return server.stubs("mine")[0]


def num_restarts(server: Server) -> int:
    return server.log.read_text().count("ready again after")


def test_a_killed_front_end_is_told_and_started_again_on_the_same_engine(shared: Server) -> None:
    before, engine = num_restarts(shared), shared.engine_process()
    with connect(shared) as client:
        text = client.generate("A tuple is", **GREEDY).text
        slow_down(pace_of(shared.log), SLOW_STEP_S)
        streams = [client.stream("A tuple is", **LONG) for _ in range(4)]
        for stream in streams:
            next(stream)
        stub = front_end(shared)
        stub.kill()
        slow_down(pace_of(shared.log), 0.0)
        for stream in streams:
            with pytest.raises(tc.ServerUnavailable):
                stream.read()
        wait_for(lambda: num_restarts(shared) > before, RESTART_LIMIT_S, "restart")
        assert client.generate("A tuple is", **GREEDY).text == text
    assert shared.engine_process() == engine
    assert f"a front end of model 'mine' died (stub process {stub.pid})" in shared.log.read_text()
    wait_for(lambda: shared.metric("vllm:num_requests_running") == 0, 60, "end of the old requests")


def num_loads(server: Server) -> int:
    return server.log.read_text().count("is loaded again after")


def test_a_paused_front_end_that_a_request_finds_is_replaced(shared: Server) -> None:
    """With Triton 2.51, it or tritonserver aborts when it goes on (`boost::interprocess::lock_exception`)."""
    before = num_restarts(shared) + num_loads(shared)
    with connect(shared) as client:
        text = client.generate("A tuple is", **GREEDY).text
        stub = front_end(shared)
        stub.suspend()
        with pytest.raises(tc.ServerUnavailable, match="is not healthy"):
            client.generate("A tuple is", **GREEDY)
        wait_for(lambda: shared.readiness() == (503, "hung"), RESTART_LIMIT_S, "the pause")
        stub.resume()
        wait_for(lambda: num_restarts(shared) + num_loads(shared) > before, RESTART_LIMIT_S, "restart")
        assert client.generate("A tuple is", **GREEDY).text == text


def test_the_engine_does_not_survive_a_killed_serve(server: Server) -> None:
    processes = server.descendants()
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not left(processes), 60, "end of the orphans")


def test_demo(folder: Path) -> None:
    command = [sys.executable, "-m", "tidewheel.cli.main", "demo", "--max-tokens", "5"]
    done = subprocess.run(
        [*command, "--model-repository", str(REPOSITORY)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"tokens in, [1-5] out;", done.stdout)) == 3
    assert "error" not in done.stderr
    assert list((folder / "tmp").iterdir()) == []
