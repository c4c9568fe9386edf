"""The model of digits through the real server: files, OpenAI's path, the client, and one line for bad input."""

from __future__ import annotations

import base64
import json
import queue
import re
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from support.gateway.browser import HAS_BROWSER, MISSING, browser
from support.triton.serving import ROOT, Server, start_server, stop_server, wait_ready
from tidewheel_client import Client, InvalidRequest, Picture

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
    running = wait_ready(start_server("--model-repository", str(repository), log=log, with_gateway=True))
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
    assert {one["name"]: one["shape"] for one in answer["outputs"]} == {
        "image": [8, 8, 1], "step": [1], "steps": [1], "finish_reason": [1],
    }  # fmt: skip
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


def test_openai_s_path(served: Server) -> None:
    def ask(**body: Any) -> Any:
        return served.session.post(
            f"{served.openai}/v1/images/generations", json={"model": "digits", "label": 5, **body}, timeout=60
        )

    models = served.session.get(f"{served.openai}/v1/models", timeout=60).json()["data"]
    assert [(one["id"], one["task"]) for one in models] == [("digits", "draw")]
    answer = ask(n=2, seed=1, size="8x8", priority=1, guidance_scale=2.5).json()
    first, second = (pixels(base64.b64decode(one["b64_json"])) for one in answer["data"])
    assert first.shape == (8, 8) and not np.array_equal(first, second)
    assert answer["usage"]["output_tokens"] == 24
    lines = ask(seed=2, stream=True, partial_images=3).text.splitlines()
    *previews, last = [json.loads(line[len("data: ") :]) for line in lines if line.startswith("data: ")]
    assert {one["step"] for one in previews} <= {3, 6, 9} and last["step"] == last["steps"] == 12
    [alone] = generate(served, "generate", label=5, seed=2)
    assert np.array_equal(np.array(alone["image"]).reshape(8, 8), pixels(base64.b64decode(last["b64_json"])))
    for wrong, words in {
        "size": ("16x8", "the model offers 8x8"), "steps": (0, "must be 1 to 100"), "label": (10, "0 to 9"),
    }.items():  # fmt: skip
        value, limit = words
        error = ask(**{wrong: value}).json()["error"]
        assert (error["param"], error["tag"]) == (wrong, "TW-INPUT") and limit in error["message"]


def test_the_client_gets_previews_and_the_picture(served: Server) -> None:
    seen: list[Picture] = []
    with Client(served.grpc, model="digits", timeout_s=60) as client:
        picture = client.generate_image(label=8, seed=3, on_progress=seen.append)
        assert seen[-1] is picture and (picture.step, picture.steps) == (12, 12)
        steps = [one.step for one in seen]
        assert steps == sorted(set(steps)) and picture.image is not None and picture.image.shape == (8, 8, 1)
        with pytest.raises(InvalidRequest, match="steps is 10000: it must be 1 to 100"):
            client.generate_image(label=8, steps=10_000)
        with pytest.raises(InvalidRequest, match="unexpected inference input 'prompt'"):
            client.generate_image("eight")
        with pytest.raises(InvalidRequest, match=r"missing required input\(s\) \['label'\]"):
            client.generate_image()
    with Client(served.http, model="digits", timeout_s=60) as client:
        file = client.generate_image(label=8, seed=3, format="png_base64").png_base64
    assert np.array_equal(pixels(base64.b64decode(file)), picture.image[:, :, 0])


def test_the_page_s_examples_run(served: Server) -> None:
    section = (ROOT / "docs" / "many_steps.md").read_text("utf-8").partition("## From applications")[2]
    example, command = re.findall(r"^```\w+\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[:2]
    for code in (
        [sys.executable, "-c", example.replace("127.0.0.1:8001", served.grpc)],
        ["bash", "-eo", "pipefail", "-c", command.replace("localhost:8080", served.openai.removeprefix("http://"))],
    ):
        done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert "12 of 12" in done.stdout or "image_generation.completed" in done.stdout


@pytest.mark.skipif(not HAS_BROWSER, reason=MISSING)
def test_the_playground_shows_the_picture(served: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        page.driver.get(f"{served.openai}/playground")
        page.wait(lambda: page.find("#server").text == "1 model ready", "list of models")
        page.find("input[value=label]").click()
        page.fill("#seed", "1")
        page.fill("#prompt", "7\n")
        page.wait(lambda: page.texts(".turn .figures dd"), "end of the picture")
        assert "step 12 of 12" in page.texts(".turn .figures dd")
        assert page.run("return document.querySelector('.turn img').naturalWidth") == 8
        assert page.problems() == []
