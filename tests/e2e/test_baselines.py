"""The baselines beside the demo model in the real tritonserver: the same tokens, by batches that Triton forms."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from support.models import tiny_models
from support.models.gguf_files import write_model
from support.triton.serving import (
    WEIGHTS,
    Server,
    StreamError,
    grpc_inputs,
    grpc_stream,
    start_server,
    stop_server,
    wait_for,
    wait_ready,
)
from support.triton.serving import token_ids as streamed_ids

pytestmark = pytest.mark.e2e

ENTRIES = Path(__file__).parents[2] / "model_repository"
Reference = Callable[[str, int], tuple[list[int], list[int], str]]
BASELINES = ("baseline_dynamic", "baseline_static")
PROMPTS = [
    "A tuple is",
    "The server process",
    "To create a table with a primary key, and an index on two of its columns, one",
    "import",
]
GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0}
NUM_REQUESTS = 48
COUNTS = ("request_success", "count", "exec_count")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The entries as they are, but in float32: rounding in bfloat16 depends on the order of a sum."""
    repository = tmp_path_factory.mktemp("repository")
    for name in ("demo", *BASELINES):
        folder = repository / name
        (folder / "1").mkdir(parents=True)
        text = (ENTRIES / name / "config.pbtxt").read_text()
        dtype = 'parameters { key: "dtype" value { string_value: "float32" } }\n'
        (folder / "config.pbtxt").write_text(text + dtype)
    (repository / "demo" / "1" / "weights").symlink_to(WEIGHTS)
    for name in BASELINES:
        (repository / name / "1" / "model.py").symlink_to(ENTRIES / name / "1" / "model.py")
    log = repository / "serve.log"
    running = wait_ready(start_server("--model-repository", str(repository), log=log))
    yield running
    assert stop_server(running) == 0, log.read_text()


class Baseline:
    """Unary requests to one model; `clients` are shared by threads."""

    def __init__(self, server: Server, model: str) -> None:
        self.server, self.model = server, model
        self.client = grpcclient.InferenceServerClient(server.grpc)
        self.before = self.counts()
        self.answers: list[grpcclient.InferResult] = []

    def infer(self, prompt: str, max_tokens: int) -> tuple[list[int], str, str]:
        """Token ids, text and finish reason."""
        inputs = grpc_inputs(prompt, max_tokens=max_tokens)
        result = self.infer_tensors(inputs)
        ids = result.as_numpy("token_ids")[0].tolist()
        assert result.as_numpy("num_output_tokens").tolist() == [[len(ids)]]
        text, reason = (result.as_numpy(name)[0, 0].decode() for name in ("text_output", "finish_reason"))
        return ids, text, reason

    def infer_tensors(self, inputs: list[grpcclient.InferInput]) -> grpcclient.InferResult:
        result = self.client.infer(self.model, [with_batch_dimension(tensor) for tensor in inputs])
        self.answers.append(result)
        return result

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        """Send a long request before those of the block, so that they gather however slowly they come."""
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.infer, PROMPTS[0], 300)
            yield
            assert answer.result()[0]

    def counts(self) -> np.ndarray:
        """Triton's requests, inferences and batches of the model."""
        return np.array([self.server.metric(f"nv_inference_{name}", model=self.model) for name in COUNTS])

    def counted(self) -> list[float]:
        """Return the counts since the start, with every answer in them: Triton counts after it has answered."""
        due = len(self.answers)
        wait_for(lambda: (self.counts() - self.before)[:2].min() >= due, 60, "Triton to count its answers")
        return [float(count) for count in self.counts() - self.before]


def with_batch_dimension(tensor: grpcclient.InferInput) -> grpcclient.InferInput:
    tensor.set_shape([1, *tensor.shape()])
    return tensor


@pytest.fixture(params=BASELINES)
def baseline(server: Server, request: pytest.FixtureRequest) -> Iterator[Baseline]:
    one = Baseline(server, request.param)
    yield one
    one.counted()
    one.client.close()


def test_the_demo_engine_says_the_same(server: Server, baseline: Baseline, reference: Reference) -> None:
    jobs = [(prompt, 8 * (i + 1)) for i, prompt in enumerate(PROMPTS)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: baseline.infer(*job), jobs))
    for (prompt, max_tokens), (ids, text, reason) in zip(jobs, answers, strict=True):
        inputs = grpc_inputs(prompt, stream=True, return_token_ids=True, max_tokens=max_tokens, **GREEDY)
        results = grpc_stream(server, inputs)
        assert ids == streamed_ids(results) == reference(prompt, max_tokens)[1][: len(ids)]
        assert text == "".join(result.as_numpy("text_output")[0].decode() for result in results)
        assert reason in ("length", "stop")


def test_triton_forms_batches_of_prompts_of_any_length(baseline: Baseline) -> None:
    start = threading.Barrier(NUM_REQUESTS)

    def ask(index: int) -> list[int]:
        start.wait(60)
        return baseline.infer(PROMPTS[index % len(PROMPTS)], 6)[0]

    with baseline.occupied(), ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(ask, range(NUM_REQUESTS)))
    for index, ids in enumerate(answers):
        assert ids == answers[index % len(PROMPTS)]
    succeeded, inferred, batches = baseline.counted()
    assert succeeded == inferred == NUM_REQUESTS + 1
    assert batches <= NUM_REQUESTS / 4 + 1


def test_token_ids_of_any_length_share_a_batch(baseline: Baseline) -> None:
    start = threading.Barrier(16)

    def ask(index: int) -> int:
        start.wait(60)
        inputs = grpc_inputs(input_ids=list(range(5, 6 + index)), max_tokens=4, ignore_eos=True)
        result = baseline.infer_tensors(inputs)
        assert result.as_numpy("num_input_tokens").tolist() == [[index + 1]]
        return int(np.size(result.as_numpy("token_ids")))

    with baseline.occupied(), ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == [4] * 16
    _, inferred, batches = baseline.counted()
    assert inferred == 17
    assert batches <= 9


def test_generate_over_http(server: Server, baseline: Baseline) -> None:
    answer = server.post(f"{baseline.model}/generate", {"text_input": PROMPTS[0], "max_tokens": 5}).json()
    assert answer["token_ids"] == baseline.infer(PROMPTS[0], 5)[0]
    refused = server.post(f"{baseline.model}/generate", {"text_input": PROMPTS[0], "max_tokens": 2000})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("[TW-INPUT] max_tokens is 2000")


def test_a_baseline_does_not_stream(server: Server, baseline: Baseline) -> None:
    with pytest.raises(StreamError, match="stream"):
        grpc_stream(server, grpc_inputs(PROMPTS[0], max_tokens=4, stream=True), model=baseline.model)


def test_a_gguf_file_beside_its_baseline(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.llama, tmp_path / "hf")
    file = write_model(tmp_path / "a.gguf", model)
    baseline = (ENTRIES / BASELINES[0] / "config.pbtxt").read_text().replace("../../demo/1/weights", str(file))
    settings = {"model": str(file), "dtype": "float32", "num_blocks": "64"}
    parameters = (f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}\n' for k, v in settings.items())
    ours = 'backend: "tidewheel"\n' + "".join(parameters)
    for name, text in {"ours": ours, BASELINES[0]: baseline}.items():
        (tmp_path / "repository" / name / "1").mkdir(parents=True)
        (tmp_path / "repository" / name / "config.pbtxt").write_text(text)
    code = Path(BASELINES[0], "1", "model.py")
    (tmp_path / "repository" / code).symlink_to(ENTRIES / code)
    log, variables = tmp_path / "serve.log", {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    running = start_server("--model-repository", str(tmp_path / "repository"), log=log, variables=variables)
    server = wait_ready(running)
    prompts, expected = tiny_models.clear_prompts(model, tiny_models.prompts(20, 4, 40), 3, 8)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for prompt, tokens in zip(prompts, expected, strict=True):
            inputs = grpc_inputs(input_ids=prompt.tolist(), max_tokens=8, ignore_eos=True)
            more = grpc_inputs(stream=True, return_token_ids=True, **GREEDY)
            assert streamed_ids(grpc_stream(server, inputs + more, model="ours")) == tokens
            result = client.infer(BASELINES[0], [with_batch_dimension(tensor) for tensor in inputs])
            assert result.as_numpy("token_ids")[0].tolist() == tokens
    assert stop_server(server) == 0, log.read_text()
