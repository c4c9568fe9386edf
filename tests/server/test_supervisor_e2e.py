"""`tidewheel serve` with the real tritonserver and a model of a few lines: it starts, watches, and leaves nothing."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests

from support.triton.serving import Server, has_ended, start_server, stop_server, wait_for, wait_ready
from tidewheel.private_dir import RUN_DIR
from tidewheel.server import ServeError
from tidewheel.server.supervisor import REAP_GRACE_S
from tidewheel.server.workdir import work_dir

pytestmark = pytest.mark.e2e

# Says one word, waits until the file that the prompt names is there, says another.
MODEL = """
import pathlib, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        for request in requests:
            path = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            threading.Thread(target=self.answer, args=(request.get_response_sender(), path), daemon=True).start()

    def answer(self, sender, path):
        self.say(sender, "first", 0)
        while not pathlib.Path(path).exists():
            time.sleep(0.02)
        self.say(sender, "last", FINAL)

    def say(self, sender, word, flags):
        tensor = pb_utils.Tensor("text_output", np.array([word], dtype=object))
        sender.send(pb_utils.InferenceResponse([tensor]), flags=flags)
"""
CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
DRAIN_S = 600.0
DEATH_LIMIT_S = 120.0  # less than a drain may take: a death waits for no request
STOP_LIMIT_S = 120.0
RESTART_LIMIT_S = 120.0


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary and the run directory of the server; its path is short, for unix sockets lie below it."""
    path = Path(tempfile.mkdtemp(prefix="tw"))
    (path / "tmp").mkdir(mode=0o700)
    for name in ("TMPDIR", RUN_DIR):
        monkeypatch.setenv(name, str(path / "tmp"))
    yield path
    shutil.rmtree(path)


def repository(folder: Path, initialize: str = "pass") -> Path:
    entry = folder / "repository" / "words"
    (entry / "1").mkdir(parents=True)
    (entry / "config.pbtxt").write_text(CONFIG)
    (entry / "1" / "model.py").write_text(MODEL.replace("{initialize}", initialize))
    return entry.parent


def serve(folder: Path, *arguments: str, initialize: str = "pass") -> Server:
    return start_server("--model-repository", str(repository(folder, initialize)), *arguments, log=folder / "log")


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    running = wait_ready(serve(folder, f"--drain-s={DRAIN_S}"))
    yield running
    if running.process.poll() is None:
        stop_server(running)


def regions(server_temp: str) -> list[str]:
    """Shared-memory regions of the server whose work folder has this name."""
    token = server_temp.removeprefix("serve-")
    return [path.name for path in Path("/dev/shm").glob(f"tidewheel_{token}_*")]


class Traces:
    """What a server has at one moment; later, that nothing of it is left."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.processes = server.descendants()
        (self.work,) = (folder / "tmp").glob("serve-*")

    def processes_left(self) -> list[psutil.Process]:
        return [process for process in self.processes if not has_ended(process)]

    def assert_nothing_left(self) -> None:
        assert self.processes_left() == []
        assert not self.work.exists()
        assert regions(self.work.name) == []


def stream(server: Server, release: Path) -> Iterator[str]:
    body = {"text_input": str(release)}
    # An idle connection that is kept would make Triton wait.
    with server.post("words/generate_stream", body, stream=True, headers={"Connection": "close"}) as response:
        for line in response.iter_lines(chunk_size=1):
            if line:
                yield line.decode()


def wait_end(server: Server, limit_s: float) -> int:
    return server.process.wait(limit_s)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_ready_and_asked_to_stop(server: Server, folder: Path, number: signal.Signals) -> None:
    traces = Traces(server, folder)
    assert regions(traces.work.name)
    server.process.send_signal(number)
    assert wait_end(server, STOP_LIMIT_S) == 0
    traces.assert_nothing_left()
    output = server.log.read_text()
    assert f"http://127.0.0.1:{server.http_port}" in output
    assert "words: backend python" in output
    assert "Traceback" not in output


def test_listens_on_loopback_alone(server: Server, folder: Path) -> None:
    listening = [
        connection.laddr
        for process in (psutil.Process(server.process.pid), *Traces(server, folder).processes)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    ports = {server.http_port, server.grpc_port, server.metrics_port, server.health_port}
    assert {address.port for address in listening} == ports
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_closed_apis(server: Server) -> None:
    for path in ("systemsharedmemory/region/r/register", "trace/setting", "logging"):
        refusal = requests.post(f"{server.http}/v2/{path}", data="{}", timeout=60)
        assert refusal.status_code == 403
        assert "tidewheel serve --open-api" in refusal.text
    for action in ("load", "unload"):
        refusal = control(server, action)
        assert refusal.status_code == 503
        assert "explicit model load / unload is not allowed" in refusal.text
    index = requests.post(f"{server.http}/v2/repository/index", timeout=60)
    assert index.json() == [{"name": "words", "version": "1", "state": "READY"}]


def test_sigterm_lets_a_running_request_end(server: Server, folder: Path) -> None:
    traces = Traces(server, folder)
    release = folder / "release"
    answer = stream(server, release)
    assert "first" in next(answer)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "stopping" in server.log.read_text(), 60, "the notice")
    release.touch()
    assert "last" in next(answer)
    assert wait_end(server, STOP_LIMIT_S) == 0
    traces.assert_nothing_left()


def test_a_request_that_does_not_end_in_time_is_cut_off(folder: Path) -> None:
    server = wait_ready(serve(folder, "--drain-s", "0.5"))
    traces = Traces(server, folder)
    answer = stream(server, folder / "never")
    next(answer)
    server.process.send_signal(signal.SIGTERM)
    assert wait_end(server, STOP_LIMIT_S) == 0
    traces.assert_nothing_left()


def test_asking_twice_ends_at_once(server: Server, folder: Path) -> None:
    traces = Traces(server, folder)
    answer = stream(server, folder / "never")
    next(answer)
    server.process.send_signal(signal.SIGINT)
    wait_for(lambda: "stopping" in server.log.read_text(), 60, "the notice")
    server.process.send_signal(signal.SIGINT)
    assert wait_end(server, DEATH_LIMIT_S) == 130
    traces.assert_nothing_left()


@pytest.mark.parametrize("victim", ["stub", "tritonserver"])
def test_a_death_ends_the_group_without_restarts(folder: Path, victim: str) -> None:
    server = wait_ready(serve(folder, "--no-restart"))
    traces = Traces(server, folder)
    (server.stubs()[0] if victim == "stub" else server.triton_process()).kill()
    assert wait_end(server, DEATH_LIMIT_S) == 1
    traces.assert_nothing_left()
    assert "died" in server.log.read_text()
    if victim == "tritonserver":  # its own words, with their times, and no guess at a cause
        assert "tritonserver died (signal 9, Killed)\nIt printed last:\n" in server.log.read_text()
        assert re.search(r"\n  I\d{4} [\d:.]+ \d+ \S+\] .*Started Metrics Service", server.log.read_text())


def test_a_death_starts_the_server_again_up_to_a_limit(server: Server, folder: Path) -> None:
    (work,) = (folder / "tmp").glob("serve-*")
    num_regions = len(regions(work.name))
    server.stubs()[0].kill()  # of a foreign backend, so noticed late
    for number in range(1, 5):
        wait_for(lambda n=number: server.log.read_text().count("ready again after") == n, RESTART_LIMIT_S, "restart")
        (release := folder / "release").touch()
        assert len(list(stream(server, release))) == 2
        assert len(regions(work.name)) == num_regions
        traces = Traces(server, folder)
        server.triton_process().kill()
    assert wait_end(server, DEATH_LIMIT_S) == 1
    traces.assert_nothing_left()
    (end,) = error_lines(server)
    assert end.startswith("tidewheel: error: 5 deaths within 60 s of service, so the server is not started again; ")
    assert end.endswith("the last: tritonserver died (signal 9, Killed)")


def test_the_gateway_outlives_tritonserver_and_is_started_again(folder: Path) -> None:
    arguments = ("--model-repository", str(repository(folder)))
    server = wait_ready(start_server(*arguments, log=folder / "log", with_gateway=True))
    address = f"http://127.0.0.1:{server.openai_port}/v1"
    wait_for(lambda: address in server.log.read_text(), RESTART_LIMIT_S, "the gateway's address")
    started = sorted(server.processes("gateway.run_gateway"), key=psutil.Process.create_time)
    assert len(started) == 3  # the workers last
    server.triton_process().kill()
    wait_for(lambda: "ready again after" in server.log.read_text(), RESTART_LIMIT_S, "restart")
    assert set(server.processes("gateway.run_gateway")) == set(started)
    started[0].kill()
    wait_for(lambda: "the gateway died" in server.log.read_text(), RESTART_LIMIT_S, "the notice")
    wait_for(server.is_ready, RESTART_LIMIT_S, "another gateway")
    traces = Traces(server, folder)
    assert stop_server(server) == 0
    traces.assert_nothing_left()


def control(server: Server, action: str) -> requests.Response:
    return requests.post(f"{server.http}/v2/repository/models/words/{action}", timeout=60)


def test_an_unload_is_no_death_and_a_model_loaded_later_is_watched(folder: Path) -> None:
    server = wait_ready(serve(folder, "--model-control", "explicit", "--models", "words", "--no-restart"))
    server.control("unload", "words")
    wait_for(lambda: not server.stubs(), STOP_LIMIT_S, "end of the stub")
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(REAP_GRACE_S + 1.0)
    model = folder / "repository" / "words" / "1" / "model.py"
    text = model.read_text()
    model.write_text(
        text.replace("def initialize(self, args):\n", "def initialize(self, args):\n        raise OSError\n")
    )
    with pytest.raises(ServeError, match="model 'words' cannot be loaded"):
        server.control("load", "words")
    model.write_text(text)
    server.control("load", "words")
    (stub,) = server.stubs()
    stub.kill()
    assert wait_end(server, DEATH_LIMIT_S) == 1
    assert f"a front end died (stub process {stub.pid})" in server.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_nothing_survives_when_serve_itself_is_killed(server: Server, folder: Path, number: signal.Signals) -> None:
    traces = Traces(server, folder)
    answer = stream(server, folder / "never")
    assert "first" in next(answer)
    server.process.send_signal(number)
    assert server.process.wait(DEATH_LIMIT_S) == -number
    wait_for(lambda: not traces.processes_left(), STOP_LIMIT_S, "end of the orphans")
    traces.assert_nothing_left()


def test_a_start_ends_what_a_killed_server_and_its_guard_left(server: Server, folder: Path) -> None:
    traces = Traces(server, folder)
    (guard,) = guards(server)
    server.process.send_signal(signal.SIGSTOP)  # so that it starts no other guard
    guard.kill()
    server.process.kill()
    server.process.wait()
    with work_dir(folder / "tmp"):
        traces.assert_nothing_left()


def guards(server: Server) -> list[psutil.Process]:
    return server.processes("tidewheel.server.workdir")


def test_a_guard_that_died_is_started_again(server: Server, folder: Path) -> None:
    (guard,) = guards(server)
    guard.kill()

    def another() -> bool:
        return any(process != guard for process in guards(server))

    wait_for(another, STOP_LIMIT_S, "another guard")
    traces = Traces(server, folder)
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not traces.processes_left(), STOP_LIMIT_S, "end of the orphans")
    traces.assert_nothing_left()


def error_lines(server: Server) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if "error:" in line]


def test_a_model_that_fails_is_one_line(folder: Path) -> None:
    server = serve(folder, initialize='raise pb_utils.TritonModelException("max_num_seqs is 0: at least 1")')
    assert wait_end(server, STOP_LIMIT_S) == 1
    assert error_lines(server) == ["tidewheel: error: model 'words' cannot be loaded: max_num_seqs is 0: at least 1"]
    assert "Traceback" not in server.log.read_text()
    assert list((folder / "tmp").iterdir()) == []


def test_an_entry_that_cannot_be_read_is_one_line(folder: Path) -> None:
    (repository(folder) / "words" / "config.pbtxt").write_text('backend: "python" nonsense: 1')
    server = start_server("--model-repository", str(folder / "repository"), log=folder / "log")
    assert wait_end(server, STOP_LIMIT_S) == 1
    (line,) = error_lines(server)
    assert "words" in line
    assert "nonsense" in line


def test_stopped_while_it_loads(folder: Path) -> None:
    loading = folder / "loading"
    server = serve(folder, initialize=f"pathlib.Path({str(loading)!r}).touch(); threading.Event().wait()")
    wait_for(loading.exists, STOP_LIMIT_S, "start of the load")
    traces = Traces(server, folder)
    server.process.send_signal(signal.SIGTERM)
    assert wait_end(server, STOP_LIMIT_S) == 0
    traces.assert_nothing_left()


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidewheel.cli.main", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_port_in_use_is_one_line(server: Server, folder: Path) -> None:
    done = run_serve("--model-repository", str(folder / "repository"), "--http-port", str(server.http_port))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"port {server.http_port}" in line
    assert "--http-port" in line


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--model", "/no/such/folder"], 1, "no such folder"),
        (["--model-repository", "/no/such/folder"], 1, "no such folder"),
        (["--model", "a/b", "--set", "max_num_seq=3"], 1, "max_num_seqs"),
        (["--model", "a/b", "--model-repository", "x"], 2, "exclude"),
        (["--model", "a/b", "--models", "x"], 2, "--models"),
        (["--model-repository", "model_repository", "--models", "x"], 1, "baseline_dynamic"),
        (["--set", "dtype=float32"], 2, "--set"),
        (["--model-control", "explicit", "--repository-poll-s", "3"], 2, "poll, not with explicit"),
        (["--open-api", "model-repository"], 2, "goes with --model-control explicit"),
        (["--model-repository", "model_repository", "--model-control", "explicit", "--models", "x"], 1, "demo_infer"),
        (["--model", "a/b", "--log-file", "/no/such/folder/log"], 1, "--log-file"),
        (["--model", "a/b", "--tritonserver", "/no/such/program"], 1, "/no/such/program"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], code: int, word: str) -> None:
    done = run_serve(*arguments, "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--health-port", "0")
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert line.startswith("tidewheel: error: ")
    assert word in line


def test_a_run_directory_without_room_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run := folder / "run").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(run)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing may be mounted here")
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(run))
    try:
        done = run_serve("--model-repository", str(repository(folder)), "--http-port", "0", "--health-port", "0")
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert f"{run} cannot be written (No space left on device): make room" in line
        assert list(run.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(run)], check=True)


def hold_imports(folder: Path) -> Path:
    """Let the model write its process id into the file that is returned, and wait in its import until it is gone."""
    model, hold = folder / "repository" / "words" / "1" / "model.py", folder / "hold"
    code = f"""
import os, pathlib, time
hold = pathlib.Path({str(hold)!r})
if hold.exists():
    hold.write_text(str(os.getpid()))
while hold.exists():
    time.sleep(0.02)
"""
    model.write_text(code + model.read_text())
    hold.touch()
    return hold


def kill_importing_stub(hold: Path) -> None:
    wait_for(hold.read_text, RESTART_LIMIT_S, "a front end that imports its model")
    psutil.Process(int(hold.read_text())).kill()


def test_a_front_end_that_dies_in_its_import_ends_the_first_start(folder: Path) -> None:
    """Triton itself waits for it for ever."""
    repository(folder, "pass")
    hold = hold_imports(folder)
    server = start_server("--model-repository", str(folder / "repository"), log=folder / "log")
    kill_importing_stub(hold)
    assert wait_end(server, DEATH_LIMIT_S) == 1
    (end,) = error_lines(server)
    assert end.startswith("tidewheel: error: a front end died while the server started (stub process ")


def test_a_front_end_that_dies_in_its_import_is_started_again(server: Server, folder: Path) -> None:
    hold = hold_imports(folder)
    server.triton_process().kill()
    kill_importing_stub(hold)
    hold.unlink()
    wait_for(lambda: "ready again after" in server.log.read_text(), RESTART_LIMIT_S, "restart")
    assert "a front end died while the server started" in server.log.read_text()
