import contextlib
import importlib.util
import json
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tidewheel.bench import BenchError
from tidewheel.bench.driver import BenchTransport
from tidewheel.bench.targets import TRITON_ONE_SHOT, BenchTarget, OneShotEntry
from tidewheel.bench.transports.peer import PeerTransport
from tidewheel.bench.transports.tensors import OneShotModel
from tidewheel.bench.transports.triton_grpc import TritonGrpcTransport
from tidewheel.config import TEXT_ONLY
from tidewheel.errors import ConfigError
from tidewheel.server.endpoints import TritonHttp
from tidewheel.server.repository import write_entry
from tidewheel_process.child import Child, StartError

START_S = 600.0
END_S = 60.0
_HOST = "127.0.0.1"
PLAIN_CONFIG = """backend: "python"
parameters {{ key: "model" value {{ string_value: "{model}" }} }}
parameters {{ key: "num_threads" value {{ string_value: "{num_threads}" }} }}
"""
PLAIN_MODEL = """import triton_python_backend_utils
from tidewheel.bench.onnx_baseline import OnnxBaseline

class TritonPythonModel(OnnxBaseline):
    triton = triton_python_backend_utils
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    model: str
    dtype: str
    settings: dict[str, str] = field(default_factory=dict)  # of all Tidewheel engines
    baselines: Path = Path("model_repository")
    folder: Path
    one_shot: Mapping[str, OneShotEntry] = field(default_factory=dict)  # by name in workloads

    def summary(self) -> dict[str, Any]:
        folder = Path(self.model)
        about = {"model": folder.name, "model_config": model_config(folder)}
        return {**about, "dtype": self.dtype, "settings": dict(self.settings)}


def model_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config


class TargetEndpoint(NamedTuple):
    transport: BenchTransport
    metrics_url: str | None
    metrics_model: str


@contextlib.contextmanager
def deployed(
    deployment: Deployment, targets: Sequence[BenchTarget], *, with_ids: bool
) -> Iterator[dict[str, TargetEndpoint]]:
    """Start all targets. Raise `BenchError` or `ConfigError`."""
    places: dict[str, TargetEndpoint] = {}
    with contextlib.ExitStack() as stack:
        if served := [target for target in targets if target.is_served_here]:
            repository = stack.enter_context(_repository(deployment, served))
            _, grpc, metrics = stack.enter_context(_serve(repository, deployment.folder / "serve.log"))
            for target in served:
                beside = _one_shot_models(deployment, target)
                here = TritonGrpcTransport(grpc, target.name, with_ids=with_ids, beside=beside)
                places[target.name] = TargetEndpoint(here, f"http://{metrics}/metrics", target.name)
        for target in targets:
            if target.is_peer:
                settings = deployment.settings if target.is_ours else {}
                options = {"model": deployment.model, "dtype": deployment.dtype, **settings, **target.settings}
                log = deployment.folder / f"{target.name}.log"
                places[target.name] = TargetEndpoint(
                    PeerTransport(target.python or sys.executable, target.kind, options, log), None, ""
                )
            elif not target.is_served_here:
                transport = target.transport(with_ids=with_ids)
                places[target.name] = TargetEndpoint(transport, target.settings.get("metrics"), target.model)
        yield places


@contextlib.contextmanager
def _repository(deployment: Deployment, targets: Sequence[BenchTarget]) -> Iterator[Path]:
    folder = deployment.folder / "models"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        for target in targets:
            if target.kind == "ours":
                settings = {"dtype": deployment.dtype, **deployment.settings, **_settings(target)}
                write_entry(folder, deployment.model, target.name, settings)
            else:
                _write_baseline(folder, deployment, target)
            _write_one_shot(folder, deployment, target)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _settings(target: BenchTarget) -> dict[str, str]:
    return {key: value for key, value in target.settings.items() if key not in ("entry", TRITON_ONE_SHOT)}


def _one_shot_models(deployment: Deployment, target: BenchTarget) -> dict[str, OneShotModel]:
    return {
        name: OneShotModel(f"{target.name}-{name}", dict(np.load(entry.inputs)) if entry.inputs else {})
        for name, entry in deployment.one_shot.items()
    }


def _write_one_shot(folder: Path, deployment: Deployment, target: BenchTarget) -> None:
    """Write the one-shot models beside a target: ours under its settings, or plain instances of Triton's batcher."""
    common = {**deployment.settings, **_settings(target)}
    common = {key: value for key, value in common.items() if key not in TEXT_ONLY}
    for name, entry in deployment.one_shot.items():
        if target.kind == "ours" and TRITON_ONE_SHOT not in target.settings:
            write_entry(folder, entry.model, f"{target.name}-{name}", {**common, **entry.settings})
        else:
            write_plain(folder / f"{target.name}-{name}", entry.model, entry.settings.get("num_threads", "0"))


def write_plain(entry: Path, model: str, num_threads: str, program: str = PLAIN_MODEL) -> None:
    """Write an entry of Triton's Python backend that runs an ONNX file on so many threads; 0: all cores.

    It gets the path of ONNX Runtime, which may be in this process's PYTHONPATH alone. Raise `BenchError` without one.
    """
    library = importlib.util.find_spec("onnxruntime")
    if library is None or library.origin is None:
        raise BenchError("plain instances of ONNX files need onnxruntime: pip install 'tidewheel[onnx]'")
    (entry / "1").mkdir(parents=True)
    text = PLAIN_CONFIG.format(model=model, num_threads=num_threads)
    (entry / "config.pbtxt").write_text(text, encoding="utf-8")
    path = f"import sys\nsys.path.append({str(Path(library.origin).parents[1])!r})\n"
    (entry / "1" / "model.py").write_text(path + program, encoding="utf-8")


def _write_baseline(folder: Path, deployment: Deployment, target: BenchTarget) -> None:
    source = deployment.baselines / target.settings["entry"]
    try:
        config = text_format.Parse(
            (source / "config.pbtxt").read_text(encoding="utf-8"), model_config_pb2.ModelConfig()
        )
    except OSError:
        raise BenchError(
            f"target {target.name}: no entry at {source}: give --baselines the folder that has it"
        ) from None
    except text_format.ParseError as error:
        raise ConfigError(f"{source / 'config.pbtxt'}: {error}") from None
    model = str(Path(deployment.model).resolve())
    for key, value in {"model": model, "dtype": deployment.dtype, **_settings(target)}.items():
        config.parameters[key].string_value = value
    entry = folder / target.name
    shutil.copytree(source, entry, ignore=shutil.ignore_patterns("__pycache__"))
    (entry / "config.pbtxt").write_text(text_format.MessageToString(config), encoding="utf-8")


@contextlib.contextmanager
def _serve(repository: Path, log: Path) -> Iterator[list[str]]:
    ports = _free_ports(3)
    command = [sys.executable, "-m", "tidewheel.cli.main", "serve", "--model-repository", str(repository)]
    for option, port in zip(("--http-port", "--grpc-port", "--metrics-port"), ports, strict=True):
        command += [option, str(port)]
    command += ["--health-port", "0"]
    with log.open("wb") as output:
        server = Child(command, ends_with_parent=True, stdout=output, stderr=output)
    try:
        _wait_ready(server, f"{_HOST}:{ports[0]}", log)
        yield [f"{_HOST}:{port}" for port in ports]
    finally:
        server.end(END_S, signal.SIGINT)


def _wait_ready(server: Child, http: str, log: Path) -> None:
    try:
        server.wait_ready(TritonHttp(http).is_ready, START_S)
    except StartError as error:
        if not server.has_ended:
            raise BenchError(f"the server {error}: see {log}") from None
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it ended without a word"]
        raise BenchError(f"the server did not come up: {lines[-1].removeprefix('tidewheel: error: ')}") from None


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((_HOST, 0))
        return [one.getsockname()[1] for one in sockets]
