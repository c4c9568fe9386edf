"""Start, watch and stop a real `tidewheel serve`, as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests
import tritonclient.grpc as grpcclient

from tidewheel.one_shot import shared_tensors
from tidewheel.server.model_control import Action, ask_server
from tidewheel.server.workdir import WorkDir
from tidewheel_client import Figures

ROOT = Path(__file__).parents[3]
REPOSITORY = ROOT / "model_repository"
WEIGHTS = REPOSITORY / "demo" / "1" / "weights"
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
START_LIMIT_S = 180.0
NUM_RESERVED = 64

_reserved: deque[socket.socket] = deque()  # ports of which other processes of tests choose none


def free_ports(count: int) -> list[int]:
    """Choose free ports below the range from which the system serves other programs until the server has them."""
    first_of_system = int(PORT_RANGE.read_text().split()[0])
    ours = range(max(1024, first_of_system - 20_000), first_of_system)
    candidates = random.SystemRandom().sample(ours, min(len(ours), 64)) + [0] * count  # 0: the system chooses
    with contextlib.ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            one = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # in use
                one.bind(("127.0.0.1", candidates.pop(0)))
                port = one.getsockname()[1]
                _reserve(port)
                found.append(port)
        return found


def _reserve(port: int) -> None:
    """Keep other processes of tests from the port, while this one runs. Raise `OSError` if one has it."""
    with contextlib.ExitStack() as without_name:
        name = without_name.enter_context(socket.socket(socket.AF_UNIX))
        name.bind(f"\0tidewheel-test-port-{port}")
        without_name.pop_all()
    _reserved.append(name)
    if len(_reserved) > NUM_RESERVED:
        _reserved.popleft().close()


def wait_for(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    """Poll until the condition is true and return its value, less often with time. Fail the test after the limit."""
    deadline, pause_s = time.monotonic() + limit_s, 0.02
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.15)
    pytest.fail(f"{what}: not within {limit_s} s")


def has_ended(process: psutil.Process) -> bool:
    """Return whether it has, reaped or not."""
    try:
        return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@dataclass
class Server:
    """A running `tidewheel serve`."""

    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int
    metrics_port: int
    log: Path
    health_port: int = 0
    openai_port: int = 0  # 0: no gateway
    session: requests.Session = field(default_factory=requests.Session)

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def openai(self) -> str:
        return f"http://127.0.0.1:{self.openai_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def post(self, path: str, body: Any, **kwargs: Any) -> requests.Response:
        data = body if isinstance(body, bytes | str) else json.dumps(body)
        return self.session.post(f"{self.http}/v2/models/{path}", data=data, timeout=60, **kwargs)

    def generate(self, text: str, **parameters: Any) -> dict[str, Any]:
        response = self.post("demo/generate", {"text_input": text, **parameters})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @property
    def work(self) -> WorkDir:
        """Return its private folder, which Triton's backends are in."""
        flag = "--backend-directory="
        (folder,) = (word.removeprefix(flag) for word in self.triton_process().cmdline() if word.startswith(flag))
        return WorkDir(Path(folder).parent)

    def control(self, action: Action, model: str) -> None:
        """Load, unload or reload a model through the private socket. Raise `ServeError`."""
        ask_server(self.work.control, action, model)

    def metrics(self) -> Figures:
        return Figures.parse(requests.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=60).text)

    def metric(self, name: str, **labels: str) -> float:
        """Sum the samples of one name whose labels match."""
        return sum(sample.value for sample in self.metrics().samples(name, **labels))

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def processes(self, *words: str) -> list[psutil.Process]:
        """Return the living ones with these words in their command."""
        found = []
        for process in self.descendants():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if all(word in command for word in words):
                    found.append(process)
        return found

    def stubs(self, model: str = "") -> list[psutil.Process]:
        """Return the processes of front ends, of one model or all."""
        return self.processes("triton_python_backend_stub", f"/{model}/" if model else "")

    def triton_process(self) -> psutil.Process:
        """Return the oldest: a process that it starts has its command until it becomes another program."""
        return min(self.processes("/tritonserver --"), key=psutil.Process.create_time)

    def engine_process(self) -> psutil.Process | None:
        return next(iter(self.processes("--engine-dir")), None)

    def readiness(self, path: str = "ready") -> tuple[int, str]:
        """Return status and state of `/ready` or `/live`."""
        answer = requests.get(f"http://127.0.0.1:{self.health_port}/{path}", timeout=60)
        return answer.status_code, answer.json()["state"]

    def is_ready(self) -> bool:
        """Return whether all ports answer: Triton opens that of the metrics last."""
        urls = [f"{self.http}/v2/health/ready", f"http://127.0.0.1:{self.metrics_port}/metrics"]
        urls += [f"{self.openai}/health"] if self.openai_port else []
        try:
            return all(requests.get(url, timeout=60).ok for url in urls)
        except requests.RequestException:
            return False


def start_server(
    *arguments: str,
    log: Path,
    prefix: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    with_gateway: bool = False,
) -> Server:
    """Start `tidewheel serve`, behind a `prefix` that executes the command after it."""
    http, grpc, metrics, health, openai = free_ports(5)
    command = [*prefix, sys.executable, "-m", "tidewheel.cli.main", "serve", *arguments]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    command += ["--health-port", str(health)]
    command += ["--openai-port", str(openai), "--openai-workers", "2", "--playground"] if with_gateway else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(variables or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    return Server(process, http, grpc, metrics, log, health, openai if with_gateway else 0)


def wait_ready(server: Server) -> Server:
    def ready_or_dead() -> bool:
        if server.process.poll() is not None:
            pytest.fail(f"the server ended with {server.process.returncode}:\n{server.log.read_text()}")
        return server.is_ready()

    wait_for(ready_or_dead, START_LIMIT_S, f"ready server (see {server.log})")
    return server


def stop_server(server: Server) -> int:
    server.session.close()  # tritonserver waits some 7 s for a connection that is kept open
    server.process.send_signal(signal.SIGINT)
    try:
        return server.process.wait(60)
    except subprocess.TimeoutExpired:
        server.process.kill()
        raise


def stop_without_tensors(server: Server) -> None:
    """Stop the server; none of its processes may leave tensors. Files of other servers come and go."""
    owners = {str(process.pid) for process in server.descendants()}
    assert stop_server(server) == 0, server.log.read_text()
    left = [path.name for path in shared_tensors.folder().iterdir() if path.name.partition("-")[0] in owners]
    assert not left


def grpc_inputs(text: str | None = None, **tensors: Any) -> list[grpcclient.InferInput]:
    """Make the inputs of a text prompt and any scalars or lists, typed by their Python values."""
    values = {} if text is None else {"text_input": text}
    values.update(tensors)
    inputs = []
    for name, value in values.items():
        items = value if isinstance(value, list | tuple) else [value]
        if isinstance(items[0], bool):
            array, kind = np.array(items, dtype=bool), "BOOL"
        elif isinstance(items[0], int):
            array, kind = np.array(items, dtype=np.int32), "INT32"
        elif isinstance(items[0], float):
            array, kind = np.array(items, dtype=np.float32), "FP32"
        else:
            encoded = [item if isinstance(item, bytes) else item.encode() for item in items]
            array, kind = np.array(encoded, dtype=np.object_), "BYTES"
        tensor = grpcclient.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


class StreamError(Exception):
    """Error response on a gRPC stream."""


def grpc_stream(
    server: Server,
    inputs: list[grpcclient.InferInput],
    *,
    model: str = "demo",
    headers: dict[str, str] | None = None,
    **options: Any,
) -> list[grpcclient.InferResult]:
    """Return the responses of one request on a stream of its own. Raise `StreamError` when one is an error."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)), headers=headers)
        client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)
        results = []
        while True:
            result, error = answers.get(timeout=60)
            if error is not None:
                raise StreamError(error.message())
            response = result.get_response()
            if response.outputs:
                results.append(result)
            if response.parameters["triton_final_response"].bool_param:
                return results


def texts(results: list[grpcclient.InferResult]) -> list[str]:
    return [result.as_numpy("text_output")[0].decode() for result in results]


def token_ids(results: list[grpcclient.InferResult]) -> list[int]:
    return [int(token) for result in results for token in result.as_numpy("token_ids")]


def sse_events(response: requests.Response) -> list[dict[str, Any]]:
    """Return the JSON of every `data:` line of a `/generate_stream` answer."""
    lines = response.iter_lines(decode_unicode=True)
    return [json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:")]


@contextlib.contextmanager
def serving_demo(
    folder: Path, config: str, *arguments: str, variables: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Serve the demo model with another `config.pbtxt`, from a repository made in `folder`; it must end cleanly."""
    shutil.copytree(REPOSITORY / "demo", folder / "demo")
    (folder / "demo" / "config.pbtxt").write_text(config)
    log = folder / "serve.log"
    server = wait_ready(start_server("--model-repository", str(folder), *arguments, log=log, variables=variables))
    yield server
    assert stop_server(server) == 0, log.read_text()
