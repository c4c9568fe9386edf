import contextlib
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from tidewheel.engine.folder import read_status
from tidewheel.engine.messages import EngineInfo
from tidewheel.health_endpoint import State
from tidewheel.server.endpoints import DeployedModel, Endpoints, is_loopback
from tidewheel.server.server_log import LogLine, without_places
from tidewheel.server.tritonserver import BACKEND
from tidewheel.version import __version__

_SHOWN: dict[State, str] = {"starting": "W", "ready": "WEF", "reloading": "WEF"}
_LEVELS = {"W": "warning", "E": "error", "F": "error"}
tqdm.monitor_interval = 0  # no thread beside one that forks
OLDEST_FOR_PRODUCTION = (2, 69)  # Triton 26.05, for its security fixes
_DEFAULT_GRPC_PORT = 8001
_PROMPT = "A tuple is"
FIRST_LINE_S = 5.0  # until the first line without a terminal; later gaps double
_TICK_S = 0.5


class Console:
    """Writer of messages above any progress bar. A closed terminal does not end the server."""

    def __init__(self, *, verbose: bool) -> None:
        self.verbose = verbose

    def report(self, text: str) -> None:
        self._write(text, sys.stdout)

    def note(self, text: str) -> None:
        self._write(f"tidewheel: {text}", sys.stderr)

    def server_line(self, line: LogLine, state: State) -> None:
        """Show a problem in Triton's log, or if verbose every line. A load shows its errors at its end."""
        if self.verbose:
            self._write(f"{line.level} {line.message}" if line.level else line.message, sys.stderr)
        elif line.is_problem and line.level in _SHOWN.get(state, ""):
            self.note(f"{_LEVELS[line.level]}: {without_places(line.message)}")

    def _write(self, text: str, stream: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            tqdm.write(text, file=stream)
            stream.flush()  # type: ignore[attr-defined]


class WaitLine:
    """Status line: redrawn on a terminal, else printed ever more rarely."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._since = clock()
        self._next_s = FIRST_LINE_S
        self._bar: tqdm | None = None

    def update(self, what: str) -> None:
        """Show activity `what` and the elapsed seconds. Call every 0.5 s."""
        seconds = self._clock() - self._since
        with contextlib.suppress(OSError, ValueError):
            if self._stream.isatty():
                if self._bar is None:
                    self._bar = tqdm(file=self._stream, leave=False, dynamic_ncols=True, bar_format="{desc}")
                self._bar.set_description_str(f"  {what}, {seconds:.0f} s")
            elif seconds >= self._next_s:
                self._next_s = 2 * seconds
                self.note(f"{what}, {seconds:.0f} s so far")

    def note(self, text: str) -> None:
        """Print a line, but not on a terminal."""
        with contextlib.suppress(OSError, ValueError):
            if not self._stream.isatty():
                print(f"  {text}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()
            self._bar = None


@contextlib.contextmanager
def waiting(what: Callable[[], str], stream: TextIO | None = None) -> Iterator[None]:
    """Show what `what` returns and the elapsed seconds on `stream` (default: standard error)."""
    line, is_over = WaitLine(stream), threading.Event()

    def tick() -> None:
        while not is_over.wait(_TICK_S):
            line.update(what())

    thread = threading.Thread(target=tick, name="wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        line.close()


class LoadProgress(WaitLine):
    """Progress of loading engines: the stage of each, with the share of it that is done."""

    def __init__(self, engines: Mapping[str, Path], stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._engines = dict(engines)
        self._seen: set[str] = set()

    def look(self) -> None:
        loading: list[str] = []
        for name, folder in self._engines.items():
            status = read_status(folder)
            if status is None or status.state not in ("starting", "loading", "ready"):
                continue
            stage = f"{name}: {'ready' if status.state == 'ready' else status.stage or 'starting'}"
            if stage not in self._seen:
                self._seen.add(stage)
                self.note(stage)
            if status.state != "ready":
                loading.append(f"{stage} {min(status.fraction, 1):.0%}")
        self.update(", ".join(loading) or "tritonserver starts")


def describe_models(
    version: str, origin: str, models: Sequence[DeployedModel], infos: Mapping[str, EngineInfo]
) -> str:
    lines = ["", f"Tidewheel {__version__} on Triton {version or 'of unknown version'} ({origin})", ""]
    for model in models:
        lines += _model_lines(model, infos)
    return "\n".join([*lines, ""])


def describe_endpoints(endpoints: Endpoints, models: Sequence[DeployedModel], *, has_playground: bool = False) -> str:
    lines = [
        f"  HTTP      http://{endpoints.authority(endpoints.http)}",
        f"  gRPC      {endpoints.authority(endpoints.grpc)}",
        f"  metrics   {endpoints.metrics_url}",
        f"  readiness {endpoints.ready_url}",
    ]
    if endpoints.openai is not None:
        lines.append(f"  OpenAI    http://{endpoints.authority(endpoints.openai)}/v1")
        lines += [f"  a page    http://{endpoints.authority(endpoints.openai)}/playground"] if has_playground else []
    example = next((m.name for m in models if m.decoupled and m.backend == BACKEND), None)
    if example is not None:
        url = "" if endpoints.grpc == _DEFAULT_GRPC_PORT else f" --url {endpoints.authority(endpoints.grpc)}"
        name = shlex.quote(example)
        body = f'{{"text_input": "{_PROMPT}", "stream": true, "max_tokens": 60}}'
        lines += [
            "",
            "Try it:",
            f'  tidewheel generate{url} --model {name} "{_PROMPT}"',
            f"  tidewheel chat{url} --model {name}",
            f"  curl -N http://{endpoints.authority(endpoints.http)}/v2/models/{name}/generate_stream -d '{body}'",
        ]
    lines += ["", f"Watch it: {top_command(endpoints)}"]
    return "\n".join([*lines, "", "Ctrl-C ends the server."])


def top_command(endpoints: Endpoints) -> str:
    return f"tidewheel top --metrics-url {endpoints.metrics_url} --health-url {endpoints.ready_url}"


def version_warning(version: str, host: str) -> str | None:
    """Return why this Triton version must not face a network, or None."""
    parts = version.split(".")[:2]
    is_known = all(part.isdigit() for part in parts)
    if is_loopback(host) or (is_known and tuple(map(int, parts)) >= OLDEST_FOR_PRODUCTION):
        return None
    return (
        f"Triton {version or 'of unknown version'} lacks security fixes and is not on loopback ({host}): serve with "
        "26.05 (server 2.69) or later, or leave --host at 127.0.0.1"
    )


def _model_lines(model: DeployedModel, infos: Mapping[str, EngineInfo]) -> list[str]:
    info = infos.get(model.name)
    if model.engine_of:
        return [f"  {model.name}: the engine of {model.engine_of}, for /infer and unary gRPC"]
    if info is None:
        return [f"  {model.name}: backend {model.backend}"]
    first, *more = info.describe()
    return [f"  {model.name}: {first.removeprefix('model: ')}", *(f"    {line}" for line in more)]
