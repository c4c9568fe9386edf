"""Entries of Triton's other backends, migrated with the demo's weights, answer their clients; and the server refuses
what the check calls an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from entries.test_planted_mistakes import CONFIG, MISTAKES, Mistake
from support.entries.foreign_entries import SAMPLE, SAMPLE_JSON, write_entry, write_trtllm
from support.triton.serving import (
    WEIGHTS,
    Server,
    grpc_inputs,
    grpc_stream,
    start_server,
    stop_server,
    texts,
    wait_ready,
)
from tidewheel.cli.main import main
from tidewheel.server import ServeError

pytestmark = pytest.mark.e2e

PROMPT = "A tuple is"


# Refused before a process is started, or by it, and settings of each kind.
REFUSED = {
    name: MISTAKES[name]
    for name in (
        "an unknown field", "another name", "a version that is not there", "two values",
        "a tensor of another type", "a batch size", "levels without a default", "a policy of no level",
        "a preferred batch", "a response cache", "GPUs of a CPU", "what a CPU does not promise",
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "models"


@pytest.fixture(scope="module")
def migrated(repository: Path) -> Iterator[Server]:
    folder, out = repository.parent, repository
    sample = write_entry(folder / "vllm", "sample", SAMPLE, {**SAMPLE_JSON, "dtype": "float"})
    for source, status in ((sample, 0), (write_trtllm(folder / "trtllm"), 1)):
        assert main(["migrate", str(source), "--out", str(out), "--model", str(WEIGHTS)]) == status
    for config in out.glob("*/config.pbtxt"):  # the unknown parameter stays until it is removed
        lines = config.read_text().splitlines()
        config.write_text("\n".join(line for line in lines if "novel_option" not in line))
    assert main(["check", str(out)]) == 0
    log = folder / "serve.log"
    models = ("--models", "sample,ensemble,tensorrt_llm_bls", "--model-control", "explicit")
    server = wait_ready(start_server("--model-repository", str(out), *models, log=log))
    yield server
    assert stop_server(server) == 0, log.read_text()


def test_the_sample_of_the_vllm_backend(migrated: Server) -> None:
    # As its samples/client.py: the declared inputs, and parameters as JSON.
    inputs = grpc_inputs(PROMPT, stream=False, sampling_parameters='{"temperature": "0", "max_tokens": "8"}')
    (answer,) = texts(grpc_stream(migrated, inputs, model="sample"))
    assert answer.startswith(PROMPT)
    assert len(answer) > len(PROMPT)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_request_of_the_ensemble(migrated: Server, model: str) -> None:
    # As end_to_end_grpc_client.py of tensorrtllm_backend: a batch dimension.
    inputs = []
    for name, value, kind in (
        ("text_input", PROMPT.encode(), "BYTES"),
        ("max_tokens", 8, "INT32"),
        ("top_k", 1, "INT32"),
    ):
        array = np.array([[value]], dtype=np.object_ if kind == "BYTES" else np.int32)
        inputs.append(grpcclient.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    results = grpc_stream(migrated, inputs, model=model)
    assert "".join(str(text) for text in texts(results))


@pytest.mark.parametrize("mistake", REFUSED.values(), ids=REFUSED)
def test_the_server_refuses_what_the_check_refuses(
    migrated: Server, repository: Path, mistake: Mistake, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id.replace(" ", "_")
    write_entry(repository, name, CONFIG + mistake.config, mistake.model_json)
    with pytest.raises(ServeError, match=f"model '{name}' cannot be loaded: "):
        migrated.control("load", name)
    assert main(["check", str(repository / name)]) == 1
