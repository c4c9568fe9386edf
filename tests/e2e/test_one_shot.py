"""ONNX models through the real server: equal to ONNX Runtime alone, and one error each for what goes wrong."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from support.one_shot.onnx_files import FLOAT, looked_up, model, node, scaled
from support.triton.client_tensors import Array, make_inputs
from support.triton.serving import Server, start_server, stop_server, stop_without_tensors, wait_for, wait_ready
from tidewheel.cli.main import main

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

OURS = 'backend: "tidewheel"\n'
WIDE = 1 << 16  # 256 KiB of float32
CALLER = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        call = pb_utils.InferenceRequest(
            model_name="scaled", requested_output_names=["y"], inputs=request.inputs(), parameters={"priority": 1}
        )
        answer = call.exec()
        return pb_utils.InferenceResponse(answer.output_tensors(), error=answer.error())
"""
CALLER_CONFIG = """backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] }
"""
ENSEMBLE = """platform: "ensemble"
input { name: "in" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "out" data_type: TYPE_FP32 dims: [ -1, 2 ] }
ensemble_scheduling { step { model_name: "scaled" model_version: -1
  input_map { key: "x" value: "in" } output_map { key: "y" value: "out" } } }
"""


def copier() -> bytes:
    io = ("x", FLOAT, ("batch", WIDE)), ("y", FLOAT, ("batch", WIDE))
    return model([node("Identity", ["x"], ["y"])], io[:1], io[1:])


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    limit = 'parameters { key: "max_input_mb" value { string_value: "1" } }\n'
    for name, config, file, content in (
        ("scaled", OURS, "model.onnx", scaled()),
        ("table", OURS, "model.onnx", looked_up()),
        ("copier", OURS + limit, "model.onnx", copier()),
        ("caller", CALLER_CONFIG, "model.py", CALLER.encode()),
        ("chain", ENSEMBLE, "empty", b""),
    ):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        (folder / name / "1" / file).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[Server]:
    log = repository.parent / "serve.log"
    running = wait_ready(start_server("--model-repository", str(repository), log=log))
    yield running
    stop_without_tensors(running)


BOTH = pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])


def infer(
    server: Server, module: ModuleType, name: str, arrays: dict[str, Array], output: str, **asked: Any
) -> Array:
    url = server.grpc if module is tritonclient.grpc else f"127.0.0.1:{server.http_port}"
    with module.InferenceServerClient(url) as client:
        return client.infer(name, make_inputs(module, arrays), **asked).as_numpy(output)


def alone(content: bytes, **arrays: Array) -> Array:
    return onnxruntime.InferenceSession(content).run(None, arrays)[0]


@BOTH
@pytest.mark.parametrize(
    ("name", "given", "output"), [("scaled", "x", "y"), ("caller", "x", "y"), ("chain", "in", "out")]
)
def test_answers_are_those_of_the_library(
    served: Server, module: ModuleType, name: str, given: str, output: str
) -> None:
    x = np.random.default_rng(1).random((3, 4), np.float32)
    found = infer(served, module, name, {given: x}, output)
    assert found.dtype == np.float32 and (found == alone(scaled(), x=x)).all()


@BOTH
def test_large_tensors_pass_by_shared_memory(served: Server, module: ModuleType) -> None:
    x = np.random.default_rng(2).random((1, WIDE), np.float32)
    assert (infer(served, module, "copier", {"x": x}, "y") == x).all()


def test_many_at_once_are_batched_and_each_gets_its_own(served: Server) -> None:
    rows = np.random.default_rng(3).random((64, 4), np.float32)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda row: infer(served, tritonclient.grpc, "scaled", {"x": row[None]}, "y"), rows))
    assert np.allclose(np.concatenate(found), alone(scaled(), x=rows), rtol=1e-5)


def test_a_curl_is_enough(served: Server) -> None:
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}
    answer = served.post("scaled/infer", body)
    assert answer.status_code == 200, answer.text
    assert np.allclose(answer.json()["outputs"][0]["data"], np.log([6, 4]), rtol=1e-6)


def test_the_configuration_is_completed(served: Server) -> None:
    config = served.session.get(f"{served.http}/v2/models/scaled/config", timeout=60).json()
    found = [(one["name"], one["data_type"], list(map(int, one["dims"]))) for one in config["input"]]
    assert found == [("x", "TYPE_FP32", [-1, 4])]


@BOTH
@pytest.mark.parametrize(
    ("name", "arrays", "words"),
    [
        ("scaled", {"x": np.zeros((1, 4))}, ["FP64", "FP32"]),
        ("scaled", {"x": np.zeros((1, 5), np.float32)}, ["[1,5]", "[-1,4]"]),
        ("scaled", {"x": np.zeros((33, 4), np.float32)}, ["TW-INPUT", "batch dimension is 33"]),
        ("scaled", {"x": np.zeros((1, 4), np.float32)}, ["TW-NUMERIC", "output y"]),
        ("table", {"rows": np.array([[0, 9]])}, ["TW-MODEL", "bounds"]),
        ("copier", {"x": np.zeros((5, WIDE), np.float32)}, ["TW-TOO-LARGE", "max_input_mb"]),
    ],
)
def test_one_clear_error_each(
    served: Server, module: ModuleType, name: str, arrays: dict[str, Array], words: list[str]
) -> None:
    with pytest.raises(InferenceServerException) as error:
        infer(served, module, name, arrays, "y")
    assert all(word in str(error.value) for word in words), error.value


def test_request_parameters_are_those_of_every_model(served: Server) -> None:
    x = {"x": np.ones((1, 4), np.float32)}
    asked = {"qos_class": 1, "tenant": "acme", "deadline_ms": 60_000}
    assert infer(served, tritonclient.grpc, "scaled", x, "y", parameters=asked).shape == (1, 2)
    with pytest.raises(InferenceServerException, match=r"TW-INPUT.*temperature"):
        infer(served, tritonclient.grpc, "scaled", x, "y", parameters={"temperature": 1})


def test_figures_are_published(served: Server) -> None:
    infer(served, tritonclient.grpc, "scaled", {"x": np.ones((1, 4), np.float32)}, "y")
    wait_for(lambda: served.metric("tidewheel_engine_ready", model_name="scaled") == 1, 30, "the engine's figures")
    wait_for(lambda: served.metric("vllm:request_success_total", model_name="scaled") > 0, 30, "the request's")


def test_a_killed_engine_costs_its_requests_alone(served: Server) -> None:
    (engine,) = served.processes("--engine-dir", "scaled")
    engine.send_signal(signal.SIGKILL)
    x = {"x": np.ones((1, 4), np.float32)}

    def is_back() -> bool:
        try:
            return infer(served, tritonclient.grpc, "scaled", x, "y").shape == (1, 2)
        except InferenceServerException as error:
            assert "TW-ENGINE-DEAD" in str(error), error
            return False

    assert (infer(served, tritonclient.grpc, "table", {"rows": np.array([[1]])}, "values") == 11).all()
    wait_for(is_back, 60, "the engine's restart")


def test_check_names_what_is_wrong(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(repository)]) == 0, capsys.readouterr().out
    for name, content in (("broken", b"x"), ("good", scaled())):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.onnx").write_bytes(content)
    wrong = 'input { name: "x" data_type: TYPE_FP64 dims: [ -1, 4 ] }\n'
    (tmp_path / "broken" / "config.pbtxt").write_text(OURS)
    (tmp_path / "good" / "config.pbtxt").write_text(OURS + wrong)
    capsys.readouterr()
    assert main(["check", str(tmp_path)]) != 0
    out = capsys.readouterr().out
    assert "model.onnx cannot be loaded" in out and "TYPE_FP64" in out


@pytest.mark.skipif(importlib.util.find_spec("silero_vad") is None, reason="pip install --no-deps silero-vad")
def test_a_detector_of_speech_carries_its_state_through_batches(tmp_path: Path) -> None:
    (place,) = importlib.util.find_spec("silero_vad").submodule_search_locations
    file = Path(place) / "data" / "silero_vad.onnx"
    axes = json.dumps({"input": 0, "state": 1, "sr": None, "output": 0, "stateN": 1})
    (tmp_path / "vad" / "1").mkdir(parents=True)
    shutil.copy(file, tmp_path / "vad" / "1" / "model.onnx")
    (tmp_path / "vad" / "1" / "model.json").write_text(json.dumps({"batch_axes": json.loads(axes)}))
    (tmp_path / "vad" / "config.pbtxt").write_text(OURS)
    session, rate = onnxruntime.InferenceSession(str(file)), np.array(16000)
    speech = np.random.default_rng(4).standard_normal((6, 5, 1, 512)).astype(np.float32)

    def alone(windows: Array) -> list[Array]:
        state, found = np.zeros((2, 1, 128), np.float32), []
        for window in windows:
            output, state = session.run(None, {"input": window, "state": state, "sr": rate})
            found.append(output)
        return found

    def through(windows: Array) -> list[Array]:
        state, found = np.zeros((2, 1, 128), np.float32), []
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            for window in windows:
                arrays = {"input": window, "state": state, "sr": rate.reshape(1)}
                answer = client.infer("vad", make_inputs(tritonclient.grpc, arrays))
                state = answer.as_numpy("stateN")
                found.append(answer.as_numpy("output"))
        return found

    server = wait_ready(start_server("--model-repository", str(tmp_path), log=tmp_path / "serve.log"))
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(through, speech))
    assert stop_server(server) == 0
    assert np.allclose(found, [alone(windows) for windows in speech], atol=1e-5)
