"""`io_dialect: trtllm` through the running server, with what clients of the TensorRT-LLM ensemble send."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from support.triton.client_tensors import Array, make_inputs, texts
from support.triton.serving import (
    REPOSITORY,
    Server,
    StreamError,
    grpc_stream,
    sse_events,
    start_server,
    stop_server,
    wait_ready,
)

pytestmark = pytest.mark.e2e

PROMPT = "A tuple is"
TWIN = """backend: "tidewheel"
parameters { key: "engine_of" value { string_value: "demo" } }
parameters { key: "io_dialect" value { string_value: "trtllm" } }
"""
UNSIGNED = """max_batch_size: 4
model_transaction_policy { decoupled: false }
input [
  { name: "max_tokens" data_type: TYPE_UINT32 dims: [ -1 ] },
  { name: "top_k" data_type: TYPE_UINT32 dims: [ 1 ] optional: true },
  { name: "beam_width" data_type: TYPE_UINT32 dims: [ 1 ] optional: true }
]
"""
BOTH = pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
Reference = Callable[[str, int], tuple[list[int], list[int], str]]


@pytest.fixture(scope="module")
def ensembles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the demo model with two twins: `ensemble`, and `ensemble_infer` with unsigned integers.

    Shared memory is open.
    """
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(REPOSITORY / "demo", folder / "demo")
    for name, config in (("ensemble", TWIN), ("ensemble_infer", TWIN + UNSIGNED)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
    log = folder / "serve.log"
    running = wait_ready(start_server("--model-repository", str(folder), "--open-api", "shared-memory", log=log))
    yield running
    assert stop_server(running) == 0, log.read_text()


def connector(integer: type[np.generic], *, stream: bool, tokens: int = 12) -> dict[str, Array]:
    """Return the inputs of LlamaIndex's connector (int32) and of LangChain's (uint32), with their defaults."""
    return {
        "text_input": texts([PROMPT.encode()]),
        "max_tokens": np.array([[tokens]], integer),
        "top_k": np.array([[1]], integer),
        "top_p": np.array([[0]], np.float32),
        "temperature": np.array([[1.0]], np.float32),
        "length_penalty": np.array([[1.0]], np.float32),
        "repetition_penalty": np.array([[1.0]], np.float32),
        "random_seed": np.array([[0]], np.uint64),
        "beam_width": np.array([[1]], integer),
        "stream": np.array([[stream]]),
    }


def sample(**arrays: Array) -> dict[str, Array]:
    """Return the inputs of NVIDIA's `end_to_end_grpc_client.py`."""
    return {
        "text_input": texts([PROMPT.encode()]),
        "max_tokens": np.array([[6]], np.int32),
        "stream": np.array([[False]]),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[1.0]], np.float32),
        "exclude_input_in_output": np.array([[False]]),
        **arrays,
    }


def ask(server: Server, arrays: dict[str, Array], model: str = "ensemble") -> list[Any]:
    return grpc_stream(server, make_inputs(tritonclient.grpc, arrays), model=model)


def address(server: Server, module: ModuleType) -> str:
    return server.grpc if module is tritonclient.grpc else server.http.removeprefix("http://")


def joined(results: list[Any]) -> str:
    return "".join(text.decode() for result in results for text in result.as_numpy("text_output"))


def test_llamaindex_streams(ensembles: Server, reference: Reference) -> None:
    results = ask(ensembles, connector(np.int32, stream=True))
    assert joined(results) == reference(PROMPT, 12)[2]
    assert {result.as_numpy("text_output").shape for result in results} == {(1,)}
    assert len(results) > 1


@BOTH
def test_unsigned_integers_of_langchain(ensembles: Server, reference: Reference, module: ModuleType) -> None:
    inputs = make_inputs(module, connector(np.uint32, stream=False))
    with module.InferenceServerClient(address(ensembles, module)) as client:
        result = client.infer("ensemble_infer", inputs)
    assert result.as_numpy("text_output").tolist() == [(PROMPT + reference(PROMPT, 12)[2]).encode()]


@BOTH
def test_prompt_and_answer_in_shared_memory(ensembles: Server, reference: Reference, module: ModuleType) -> None:
    prompt = serialize_byte_tensor(texts([PROMPT.encode()]))
    sizes = {"in": len(prompt.item()), "out": 4096}
    inputs = {one.name(): one for one in make_inputs(module, connector(np.uint32, stream=False))}
    output = module.InferRequestedOutput("text_output")
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(module.InferenceServerClient(address(ensembles, module)))
        stack.callback(client.unregister_system_shared_memory)
        handles = {}
        for name, size in sizes.items():
            key = f"/tidewheel_test_{os.getpid()}_{name}"
            handles[name] = shared_memory.create_shared_memory_region(name, key, size)
            stack.callback(shared_memory.destroy_shared_memory_region, handles[name])
            client.register_system_shared_memory(name, key, size)
        shared_memory.set_shared_memory_region(handles["in"], [prompt])
        inputs["text_input"].set_shared_memory("in", sizes["in"])
        output.set_shared_memory("out", sizes["out"])
        client.infer("ensemble_infer", list(inputs.values()), outputs=[output])
        (text,) = shared_memory.get_contents_as_numpy(handles["out"], np.object_, [1])
    assert text.decode() == PROMPT + reference(PROMPT, 12)[2]


def test_two_sequences_with_figures(ensembles: Server) -> None:
    flags = {
        name: np.array([[True]]) for name in ("return_log_probs", "return_perf_metrics", "return_num_input_tokens")
    }
    results = ask(ensembles, sample(num_return_sequences=np.array([[2]], np.int32), **flags))
    assert [result.as_numpy("sequence_index").tolist() for result in results] == [[[0]], [[1]]]
    for result in results:
        assert result.as_numpy("text_output")[0].decode().startswith(PROMPT)
        log_probs = result.as_numpy("output_log_probs")
        assert log_probs.shape[:2] == (1, 1)
        assert result.as_numpy("cum_log_probs")[0][0] == pytest.approx(log_probs.sum(), rel=1e-4)
        assert result.as_numpy("num_input_tokens")[0][0] == 3
        assert result.as_numpy("acceptance_rate")[0][0] == 0.0
        assert result.as_numpy("kv_cache_alloc_total_blocks")[0][0] >= 1
        assert result.as_numpy("arrival_time_ns")[0][0] <= result.as_numpy("last_token_time_ns")[0][0]


def test_a_stream_ignores_exclude_input_in_output(ensembles: Server) -> None:
    streamed = joined(ask(ensembles, sample(stream=np.array([[True]]), top_k=np.array([[1]], np.int32))))
    assert streamed
    assert not streamed.startswith(PROMPT)


def test_a_stop_word_ends_the_text(ensembles: Server, reference: Reference) -> None:
    text = reference(PROMPT, 12)[2]
    stop = text[10:16]
    arrays = {**connector(np.int32, stream=True), "stop_words": texts([stop.encode(), b""])}
    assert joined(ask(ensembles, arrays)) == text[: text.index(stop)] + stop


def test_words_may_be_biased(ensembles: Server) -> None:
    bias = {
        "embedding_bias_words": texts([b" key", b" of"]),
        "embedding_bias_weights": np.array([[90.0, -90.0]], np.float32),
    }
    assert joined(ask(ensembles, sample(**bias))) == PROMPT + " key" * 6


@pytest.mark.parametrize("model", ["ensemble", "ensemble_infer"])
def test_the_generate_endpoint(ensembles: Server, model: str) -> None:
    """Post the body of NVIDIA's README."""
    body = {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": ""}
    answer = ensembles.post(f"{model}/generate", {**body, "pad_id": 2, "end_id": 2})
    assert answer.status_code == 200, answer.text
    assert answer.json()["text_output"].startswith(PROMPT)


def test_the_generate_stream_endpoint(ensembles: Server, reference: Reference) -> None:
    body = {
        "text_input": PROMPT,
        "max_tokens": 12,
        "bad_words": [""],
        "stop_words": ["zz"],
        "stream": True,
        "top_k": 1,
    }
    events = sse_events(ensembles.post("ensemble/generate_stream", {**body, "repetition_penalty": 1.0}, stream=True))
    assert "".join(event["text_output"] for event in events) == reference(PROMPT, 12)[2]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"beam_width": np.array([[2]], np.int32)}, "beam_width is 2: beam search"),
        ({"return_context_logits": np.array([[True]])}, "return_context_logits is True"),
        ({"return_generation_logits": np.array([[True]])}, "return_generation_logits is True"),
        ({"length_penalty": np.array([[0.5]], np.float32)}, "length_penalty is 0.5: beam search"),
        (
            {"guided_decoding_guide_type": texts([b"structural_tag"])},
            "guided_decoding_guide_type is 'structural_tag'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_offered_is_named(ensembles: Server, arrays: dict[str, Array], words: str) -> None:
    with pytest.raises(StreamError, match=words):
        ask(ensembles, sample(**arrays))


def test_what_asks_for_nothing_is_taken(ensembles: Server) -> None:
    off = {name: np.array([[False]]) for name in ("return_context_logits", "return_generation_logits")}
    assert ask(ensembles, sample(length_penalty=np.array([[1.0]], np.float32), **off))


@pytest.mark.parametrize(
    ("model", "words"), [("ensemble", "batch-size must be <= 1"), ("ensemble_infer", "2 elements")]
)
def test_two_prompts_in_one_request_are_refused(ensembles: Server, model: str, words: str) -> None:
    integer: type[np.generic] = np.int32 if model == "ensemble" else np.uint32
    arrays = {"text_input": texts([b"a"], [b"b"]), "max_tokens": np.array([[3], [3]], integer)}
    with pytest.raises((StreamError, InferenceServerException), match=words):
        ask(ensembles, arrays, model)
