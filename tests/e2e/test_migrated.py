"""Entries of Triton's vLLM and TensorRT-LLM backends, migrated with the demo's weights, answer their clients."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

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

pytestmark = pytest.mark.e2e

PROMPT = "A tuple is"


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("migrated")
    out = folder / "out"
    sample = write_entry(folder / "vllm", "sample", SAMPLE, {**SAMPLE_JSON, "dtype": "float"})
    for source in (sample, write_trtllm(folder / "trtllm")):
        assert main(["migrate", str(source), "--out", str(out), "--model", str(WEIGHTS)]) == 0
    assert main(["check", str(out)]) == 0
    log = folder / "serve.log"
    names = "sample,ensemble,tensorrt_llm_bls"
    server = wait_ready(start_server("--model-repository", str(out), "--models", names, log=log))
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
