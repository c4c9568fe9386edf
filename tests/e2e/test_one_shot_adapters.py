"""Each adapter through the real server: answers equal those of its library alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from transformers import AutoModel, AutoTokenizer

from support.one_shot import encoder_folder
from support.triton.client_tensors import Array, make_inputs, texts
from support.triton.serving import Server, start_server, stop_server, wait_ready

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
X = np.random.default_rng(0).standard_normal((3, 4), np.float32)


@dataclass(frozen=True)
class Case:
    """What an entry's client sends, and what the library alone answers."""

    arrays: dict[str, Array]
    output: str
    wanted: Array
    settings: dict[str, object]


class Scorer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sigmoid()


def exported(folder: Path) -> Case:
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(Scorer().eval(), (torch.ones(2, 4),), dynamic_shapes=shapes)
    torch.export.save(program, folder / "model.pt2")
    return Case({"x": X}, "sigmoid", program.module()(torch.tensor(X)).detach().numpy(), {})


def script(folder: Path) -> Case:
    program = torch.jit.script(Scorer().eval())
    program.save(folder / "model.pt")
    options = {"inputs": [["x", "FP32", ["batch", 4]]], "outputs": [["y", "FP32", ["batch", 2]]]}
    return Case({"x": X}, "y", program(torch.tensor(X)).detach().numpy(), {"adapter_options": options})


def openvino(folder: Path) -> Case:
    library = pytest.importorskip("openvino")
    from support.one_shot.openvino_file import save

    model = library.compile_model(save(folder), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return Case({"x": X, "n": np.array([1])}, "y", model([X, np.array(1)])[0], {})


def encoder(folder: Path) -> Case:
    values = ["red cat", "green dog blue", "blue"]
    path = encoder_folder.save(folder / "weights")
    tokens = AutoTokenizer.from_pretrained(path)(values, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(path)(**tokens).last_hidden_state
    mask = tokens["attention_mask"][:, :, None]
    wanted = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()
    return Case({"text": texts(*values)}, "embedding", wanted, {"adapter": "encoder", "model": "weights"})


MAKERS: dict[str, Callable[[Path], Case]] = {
    "torch_export": exported, "torch_script": script, "openvino": openvino, "encoder": encoder,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, Case | str]]]:
    """Serve an entry of each adapter whose library is installed; return the reason for others."""
    folder, cases = tmp_path_factory.mktemp("repository"), {}
    for name, make in MAKERS.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        try:
            cases[name] = case = make(version)
        except pytest.skip.Exception as reason:
            version.rmdir()
            version.parent.rmdir()
            cases[name] = str(reason)
            continue
        (version / "model.json").write_text(json.dumps(case.settings))
        (version.parent / "config.pbtxt").write_text('backend: "tidewheel"')
    log = folder.parent / "serve.log"
    running = wait_ready(start_server("--model-repository", str(folder), log=log))
    yield running, cases
    assert stop_server(running) == 0, log.read_text()


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
@pytest.mark.parametrize("name", MAKERS)
def test_answers_are_those_of_the_library(
    served: tuple[Server, dict[str, Case | str]], name: str, module: ModuleType
) -> None:
    server, cases = served
    case = cases[name]
    if isinstance(case, str):
        pytest.skip(case)
    url = server.grpc if module is tritonclient.grpc else f"127.0.0.1:{server.http_port}"
    with module.InferenceServerClient(url) as client:
        found = client.infer(name, make_inputs(module, case.arrays)).as_numpy(case.output)
    np.testing.assert_allclose(found, case.wanted, rtol=1e-4, atol=1e-6)
