"""Each way to send a request, against servers that answer by a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2

from support.bench.servers import BenchTriton, Scripted, bench_triton, ids, scripted_http, shapes
from support.triton.grpc_triton import Answer, Asked, Refused, response
from tidewheel.bench import BenchError
from tidewheel.bench.driver import BenchTransport, LoadDriver, RunLimits, RunProgress
from tidewheel.bench.outcome import OfferedRequest, RequestOutcome
from tidewheel.bench.targets import parse_target
from tidewheel.bench.transports.tensors import OneShotModel, tensor_request
from tidewheel.bench.transports.triton_grpc import TritonGrpcTransport

OFFERED = OfferedRequest(0.0, [10, 11, 12], 5, {"priority": 1})


@pytest.fixture
def triton() -> Iterator[BenchTriton]:
    with bench_triton() as fake:
        yield fake


@pytest.fixture
def http() -> Iterator[Scripted]:
    with scripted_http() as script:
        yield script


def send(target: str, *, with_ids: bool = False) -> RequestOutcome:
    return send_by(parse_target(target).transport(with_ids=with_ids))


def send_by(transport: BenchTransport, offered: OfferedRequest = OFFERED) -> RequestOutcome:
    """One request, as the driver sends it."""

    async def run() -> RequestOutcome:
        progress = RunProgress()
        await transport.open()
        try:
            await LoadDriver(transport, RunLimits(60.0), progress).open_loop([(offered,)])
        finally:
            await transport.close()
        return progress.outcomes[0]

    return asyncio.run(run())


def test_a_stream_of_ours(triton: BenchTriton) -> None:
    outcome = send(f"grpc://127.0.0.1:{triton.port}/demo", with_ids=True)
    assert [count for _, count in outcome.chunks] == [1, 4]
    assert outcome.streamed
    assert outcome.finish_reason == "length"
    assert outcome.token_ids == [9] * 5
    (asked,) = triton.asked
    assert ids(asked) == [10, 11, 12]
    assert asked.sampling == {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "priority": 1}
    assert asked.inputs["stream"] is True
    assert asked.inputs["return_token_ids"] is True


@pytest.mark.parametrize("model", ["classifier", "pictures"])  # the second is decoupled
def test_a_request_of_a_one_shot_model_beside_it(triton: BenchTriton, model: str) -> None:
    pixels = np.float32([[0.5, 0.25]])
    triton.answer = lambda asked: iter([response(asked.message)])
    beside = {"image": OneShotModel(model, {"pixels": pixels})}
    transport = TritonGrpcTransport(f"127.0.0.1:{triton.port}", "demo", beside=beside)
    outcome = send_by(transport, OfferedRequest(0.0, [4], 1, {"priority": 4}, entry="image"))
    assert outcome.is_complete and not outcome.streamed
    (asked,) = triton.asked
    assert asked.message.model_name == model
    assert asked.message.parameters["qos_class"].int64_param == 4
    assert shapes(asked) == {"pixels": [1, 2]} and asked.message.raw_input_contents[0] == pixels.tobytes()


def test_tensors_that_are_not_given_are_random_numbers() -> None:
    config = model_config_pb2.ModelConfig(max_batch_size=8)
    config.input.add(name="x", data_type=model_config_pb2.TYPE_FP16, dims=[3, -1])
    request = tensor_request(OneShotModel("m", {}), config)
    assert list(request.inputs[0].shape) == [1, 3, 1] and len(request.raw_input_contents[0]) == 6
    config.input.add(name="words", data_type=model_config_pb2.TYPE_STRING, dims=[1], optional=True)
    assert [tensor.name for tensor in tensor_request(OneShotModel("m", {}), config).inputs] == ["x"]
    config.input[1].optional = False
    with pytest.raises(BenchError, match="words"):
        tensor_request(OneShotModel("m", {}), config)


def test_ids_are_asked_for_only_when_needed(triton: BenchTriton) -> None:
    send(f"grpc://127.0.0.1:{triton.port}/demo")
    assert "return_token_ids" not in triton.asked[0].inputs


def test_a_model_that_answers_in_one_piece(triton: BenchTriton) -> None:
    outcome = send(f"grpc://127.0.0.1:{triton.port}/demo_infer")
    assert outcome.num_tokens == 5
    assert not outcome.streamed
    assert outcome.first_token == outcome.last_token
    assert outcome.tpot is None
    assert triton.asked[0].inputs["stream"] is False


def test_a_baseline_has_a_batch_dimension_and_no_qos(triton: BenchTriton) -> None:
    outcome = send(f"grpc://127.0.0.1:{triton.port}/baseline")
    assert outcome.num_tokens == 5
    assert shapes(triton.asked[0]) == {"input_ids": [1, 3], "max_tokens": [1, 1], "ignore_eos": [1, 1]}


def test_a_model_of_vllms_backend_gets_text(triton: BenchTriton) -> None:
    def say(asked: Asked) -> Answer:
        for _ in range(5):
            yield response(asked.message, text_output="x")

    triton.answer = say
    outcome = send(f"grpc://127.0.0.1:{triton.port}/vllm")
    assert outcome.num_tokens == 5
    assert triton.asked[0].inputs["text_input"] == "t10 t11 t12"
    assert set(triton.asked[0].inputs) == {"text_input", "stream", "sampling_parameters"}


@pytest.mark.parametrize("model", ["demo", "demo_infer"])
def test_a_refusal_has_its_tag(triton: BenchTriton, model: str) -> None:
    text = "[TW-BUSY retry_after_ms=250] waiting set is full"

    def refuse(asked: Asked) -> Answer:
        yield from ()
        raise Refused(grpc.StatusCode.UNAVAILABLE, text)

    triton.answer = refuse
    triton.infer_error = (grpc.StatusCode.UNAVAILABLE, text)
    outcome = send(f"grpc://127.0.0.1:{triton.port}/{model}")
    assert (outcome.code, outcome.error) == ("TW-BUSY", text)


def test_an_error_without_a_tag_has_its_status(triton: BenchTriton) -> None:
    triton.infer_error = (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
    assert send(f"grpc://127.0.0.1:{triton.port}/baseline").code == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("grpc://127.0.0.1:1/demo", "no server answers at 127.0.0.1:1"),
        ("http://127.0.0.1:1/v2/models/demo/infer", "no server answers at 127.0.0.1:1"),
        ("http://127.0.0.1:1/v1/completions?model=a", "no server answers at 127.0.0.1:1"),
    ],
)
def test_a_server_that_is_not_there(target: str, reason: str) -> None:
    with pytest.raises(BenchError, match=reason):
        send(target)


def test_a_model_that_is_not_ready(triton: BenchTriton, http: Scripted) -> None:
    triton.ready = False
    with pytest.raises(BenchError, match=r"model 'demo' at .* is not ready"):
        send(f"grpc://127.0.0.1:{triton.port}/demo")
    http.get["/v2/models/demo/ready"] = (400, {})
    with pytest.raises(BenchError, match=r"model 'demo' at .* is not ready"):
        send(f"{http.url}/v2/models/demo/generate_stream")


def test_a_model_that_is_not_known(triton: BenchTriton) -> None:
    with pytest.raises(BenchError, match="unknown model: 'none'"):
        send(f"grpc://127.0.0.1:{triton.port}/none")


def with_model(http: Scripted, inputs: list[str], max_batch_size: int = 0) -> None:
    config = {"input": [{"name": name} for name in inputs], "max_batch_size": max_batch_size}
    http.get |= {"/v2/models/demo/ready": (200, {}), "/v2/models/demo/config": (200, config)}


def test_generate_stream(http: Scripted) -> None:
    with_model(http, ["input_ids", "return_num_output_tokens", "return_finish_reason"])
    counts = ((1, "None"), (0, "None"), (4, "length"))
    events = [json.dumps({"text_output": "x", "num_output_tokens": n, "finish_reason": r}) for n, r in counts]
    http.post["/v2/models/demo/generate_stream"] = (200, events)
    outcome = send(f"{http.url}/v2/models/demo/generate_stream")
    assert [count for _, count in outcome.chunks] == [1, 4]
    assert outcome.finish_reason == "length"
    assert http.bodies[0]["input_ids"] == [10, 11, 12]
    assert http.bodies[0]["priority"] == 1


def test_generate_stream_of_a_model_that_counts_nothing(http: Scripted) -> None:
    with_model(http, ["text_input"])
    http.post["/v2/models/demo/generate_stream"] = (200, [json.dumps({"text_output": t}) for t in "abcde"])
    outcome = send(f"{http.url}/v2/models/demo/generate_stream")
    assert outcome.num_tokens == 5
    assert http.bodies[0]["text_input"] == "t10 t11 t12"


def test_infer(http: Scripted) -> None:
    with_model(http, ["input_ids", "max_tokens", "ignore_eos"], max_batch_size=8)
    http.post["/v2/models/demo/infer"] = (200, {"outputs": [{"name": "num_output_tokens", "data": [5]}]})
    outcome = send(f"{http.url}/v2/models/demo/infer")
    assert (outcome.num_tokens, outcome.streamed) == (5, False)
    sent = {tensor["name"]: tensor for tensor in http.bodies[0]["inputs"]}
    assert sent["input_ids"] == {"name": "input_ids", "datatype": "INT32", "shape": [1, 3], "data": [10, 11, 12]}
    assert set(sent) == {"input_ids", "max_tokens", "ignore_eos"}


def test_infer_with_sampling_parameters(http: Scripted) -> None:
    with_model(http, ["input_ids", "sampling_parameters", "ignore_eos", "return_num_output_tokens"])
    http.post["/v2/models/demo/infer"] = (200, {"outputs": [{"name": "num_output_tokens", "data": [5]}]})
    send(f"{http.url}/v2/models/demo/infer")
    sent = {tensor["name"]: tensor["data"] for tensor in http.bodies[0]["inputs"]}
    assert json.loads(sent["sampling_parameters"][0])["priority"] == 1
    assert "ignore_eos" not in sent  # it stands in the JSON


def openai_event(**choice: Any) -> str:
    return json.dumps({"choices": [choice]})


def test_openai_completions(http: Scripted) -> None:
    http.get["/v1/models"] = (200, {"data": [{"id": "qwen"}]})
    events = [openai_event(text="a"), openai_event(text="bcde", finish_reason="length")]
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": 5}})
    http.post["/v1/completions"] = (200, [*events, usage, "[DONE]"])
    outcome = send(f"{http.url}/v1/completions")
    assert outcome.num_tokens == 5  # as the server counts, though they came in two pieces
    assert outcome.finish_reason == "length"
    assert http.bodies[0]["model"] == "qwen"
    assert http.bodies[0]["prompt"] == [10, 11, 12]


def test_openai_chat(http: Scripted) -> None:
    http.post["/v1/chat/completions"] = (200, [openai_event(delta={"content": t}) for t in "abcde"])
    outcome = send(f"{http.url}/v1/chat/completions?model=m")
    assert outcome.num_tokens == 5
    assert http.bodies[0]["messages"] == [{"role": "user", "content": "t10 t11 t12"}]


def test_openai_without_the_model(http: Scripted) -> None:
    http.get["/v1/models"] = (200, {"data": [{"id": "qwen"}, {"id": "llama"}]})
    with pytest.raises(BenchError, match=r"model 'gpt' is not served at .*: it has qwen, llama"):
        send(f"{http.url}/v1/completions?model=gpt")


@pytest.mark.parametrize(
    ("status", "body", "code", "error"),
    [
        (503, {"error": {"message": "overloaded"}}, "HTTP 503", "overloaded"),
        (400, {"error": "[TW-INPUT] no prompt"}, "TW-INPUT", "[TW-INPUT] no prompt"),
        (200, [json.dumps({"error": "[TW-ENGINE-DEAD] gone"})], "TW-ENGINE-DEAD", "[TW-ENGINE-DEAD] gone"),
        (200, ["{broken"], "UNREADABLE", "the answer cannot be read"),
    ],
)
def test_http_errors(http: Scripted, status: int, body: Any, code: str, error: str) -> None:
    with_model(http, ["input_ids"])
    http.post["/v2/models/demo/generate_stream"] = (status, body)
    outcome = send(f"{http.url}/v2/models/demo/generate_stream")
    assert outcome.code == code
    assert error in outcome.error
