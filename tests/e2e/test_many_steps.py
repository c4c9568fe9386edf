"""The model of digits through the real server: previews, PNG files, and one line for bad input."""

from __future__ import annotations

import base64
import json
import queue
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from support.triton.serving import ROOT, Server, start_server, stop_server, wait_ready

pytest.importorskip("diffusers")
image_module = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CONFIG = """backend: "tidewheel"
parameters {{ key: "adapter" value: {{ string_value: "diffusers" }} }}
parameters {{ key: "model" value: {{ string_value: "{}" }} }}
parameters {{ key: "adapter_options" value: {{ string_value: '{}' }} }}
{}"""
ONCE = "model_transaction_policy { decoupled: false }\n"
OPTIONS = '{"null_label": 10, "default_guidance": 2, "default_steps": 12, "max_steps": 100}'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    for name, policy in (("digits", ""), ("once", ONCE)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(
            CONFIG.format(ROOT / "demo_model" / "digits", OPTIONS, policy)
        )
    log = repository.parent / "digits.log"
    running = wait_ready(start_server("--model-repository", str(repository), log=log))
    assert "Try it" not in log.read_text()  # its examples send text
    yield running
    assert stop_server(running) == 0, log.read_text()


def generate(server: Server, path: str, **fields: Any) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{server.http_port}/v2/models/digits/{path}"
    answer = server.session.post(url, json=fields, timeout=60)
    if path == "generate":
        return [answer.json()]
    return [json.loads(line[len("data: ") :]) for line in answer.text.splitlines() if line.startswith("data: ")]


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(image_module.open(BytesIO(png)))


def test_previews_stream_over_http_and_the_last_answer_is_the_picture(served: Server) -> None:
    asked = {"label": 3, "seed": 7, "steps": 10, "format": "png_base64"}
    answers = generate(served, "generate_stream", **asked, preview_every=4)
    steps = [answer["step"] for answer in answers]
    assert steps[-1] == 10 and steps == sorted(set(steps)) and set(steps) <= {4, 8, 10}
    [whole] = generate(served, "generate", **asked)
    assert whole["png"] == answers[-1]["png"] and pixels(base64.b64decode(whole["png"])).shape == (8, 8)


def test_grpc_gives_tensors_and_files(served: Server) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(served.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        label = grpcclient.InferInput("label", [1], "INT32")
        label.set_data_from_numpy(np.array([8], np.int32))
        found = []
        for image_format in ("raw", "png"):
            parameters = {"seed": 3, "format": image_format}
            client.async_stream_infer("digits", [label], parameters=parameters)
            found.append(answers.get(timeout=60))
        client.stop_stream()
    image = found[0].as_numpy("image")
    assert image.shape == (8, 8, 1) and found[0].as_numpy("step").tolist() == [12]
    assert np.array_equal(pixels(found[1].as_numpy("png")[0]), image[:, :, 0])


def test_infer_answers_where_the_entry_answers_once(served: Server) -> None:
    label = {"name": "label", "datatype": "INT32", "shape": [1], "data": [4]}
    url = f"http://127.0.0.1:{served.http_port}/v2/models/once/infer"
    answer = served.session.post(url, json={"inputs": [label], "parameters": {"seed": 1}}, timeout=60).json()
    assert {one["name"]: one["shape"] for one in answer["outputs"]} == {"image": [8, 8, 1], "step": [1]}
    refused = served.session.post(url, json={"inputs": [label], "parameters": {"preview_every": 1}}, timeout=60)
    assert "this model answers once" in refused.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 0}, "steps is 0: it must be 1 to 100 (max_steps)"),
        ({"steps": 10_000}, "steps is 10000"),
        ({"size": "64x64"}, "the model offers 8x8"),
        ({"label": 10}, "label is 10: the model's labels are 0 to 9"),
        ({"format": "gif"}, "format is 'gif'"),
    ],
)
def test_bad_input_is_one_line(served: Server, fields: dict[str, Any], words: str) -> None:
    [answer] = generate(served, "generate", **{"label": 1, **fields})
    assert words in answer["error"] and "\n" not in answer["error"]
    assert "image" in generate(served, "generate", label=1)[0]
