"""Tensors and parameters of a request, tensors of a response."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from support.triton.fake_triton import InferenceRequest, Tensor
from tidewheel.adapter.responder import response_tensors
from tidewheel.adapter.tensors import INPUTS, MAX_PARAMETER_BYTES, OUTPUTS, RETURN_FLAGS, ResponseFormat, read_request
from tidewheel.engine.messages import RequestStats
from tidewheel.errors import InvalidRequest, PromptTooLarge, TidewheelError
from tidewheel.frontend.output import OutputChunk, Response
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.sampling import TopLogprobs

_DTYPES = {
    "TYPE_STRING": np.object_, "TYPE_BOOL": np.bool_, "TYPE_INT32": np.int32, "TYPE_INT64": np.int64,
    "TYPE_UINT32": np.uint32, "TYPE_UINT64": np.uint64, "TYPE_FP32": np.float32,
}  # fmt: skip
_INPUT_DTYPES = {spec.name: _DTYPES[spec.data_type] for spec in INPUTS}
_OUTPUT_DIMS = {spec.name: spec.dims for spec in OUTPUTS}
_OUTPUT_DTYPES = {spec.name: _DTYPES[spec.data_type] for spec in OUTPUTS}


CLIENTS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRITONS = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"


def tensor(name: str, value: Any) -> Tensor:
    items = value if isinstance(value, list) else [value]
    encoded = [item.encode() if isinstance(item, str) else item for item in items]
    return Tensor(name, np.array(encoded, dtype=_INPUT_DTYPES[name]))


def read(
    parameters: dict[str, Any] | None = None, *, decoupled: bool = True, limit: int = 1000, **tensors: Any
) -> tuple[GenerateRequest, ResponseFormat]:
    request = InferenceRequest(
        [tensor(name, value) for name, value in tensors.items()],
        json.dumps(parameters) if parameters else "",
        request_id="r7",
    )
    return read_request(request, FrontendSettings(), decoupled=decoupled, max_prompt_bytes=limit, arrival_ns=5)


def parameters_of(request: GenerateRequest) -> dict[str, dict[str, object]]:
    return {source.origin: dict(source.values) for source in request.parameters}


def test_a_plain_prompt() -> None:
    request, response_format = read(text_input="Hello")
    assert request == GenerateRequest(request_id="r7", text=b"Hello", echo=True, arrival_ns=5)
    assert response_format == ResponseFormat()


@pytest.mark.parametrize(
    ("context", "parameters", "expected"),
    [
        (None, {}, ""),
        (None, {"traceparent": CLIENTS, "tracestate": "a=b"}, CLIENTS),
        ("", {"traceparent": CLIENTS}, CLIENTS),
        (json.dumps({"traceparent": TRITONS, "tracestate": ""}), {"traceparent": CLIENTS}, TRITONS),
        (json.dumps({"tracestate": ""}), {}, ""),
        (None, {"traceparent": 7}, ""),
        (None, {"traceparent": "0" * 4000}, ""),
    ],
)
def test_the_span_that_asks_is_triton_s_or_the_client_s(
    context: str | None, parameters: dict[str, Any], expected: str
) -> None:
    request = InferenceRequest([tensor("text_input", "x")], json.dumps(parameters), trace_context=context)
    for endpoint in ("http://127.0.0.1:4318", ""):
        settings = FrontendSettings(otlp_traces_endpoint=endpoint)
        read_it, _ = read_request(request, settings, decoupled=True, max_prompt_bytes=10, arrival_ns=5)
        assert read_it.traceparent == (expected if endpoint else "")
        assert read_it.parameters == ()


def test_prompt_bytes_are_passed_on_unchecked() -> None:
    assert read(text_input=b"caf\xe9")[0].text == b"caf\xe9"


def test_input_ids_are_copied_out_of_tritons_memory() -> None:
    shared = np.array([3, 1, 2], dtype=np.int32)
    request = InferenceRequest([Tensor("input_ids", shared)])
    generate, _ = read_request(request, FrontendSettings(), decoupled=True, max_prompt_bytes=100, arrival_ns=0)
    shared[:] = 0
    assert generate.input_ids is not None
    assert generate.input_ids.tolist() == [3, 1, 2]
    assert generate.input_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("timeout_us", "max_request_s", "expected"),
    [(0, None, 0), (7, None, 7), (0, 0.5, 500_000), (7, 0.5, 7), (900_000, 0.5, 500_000), (2**64 - 5, 1e-7, 1)],
)
def test_the_lower_time_limit_holds(timeout_us: int, max_request_s: float | None, expected: int) -> None:
    request = InferenceRequest([tensor("text_input", "Hi")], timeout_us=timeout_us)
    settings = FrontendSettings(max_request_s=max_request_s)
    generate, _ = read_request(request, settings, decoupled=True, max_prompt_bytes=9, arrival_ns=0)
    assert generate.timeout_us == expected


def test_messages() -> None:
    assert read(messages='[{"role": "user"}]')[0].messages == b'[{"role": "user"}]'


@pytest.mark.parametrize(
    ("stream", "exclude", "echo"),
    [(None, None, True), (False, None, True), (None, True, False), (None, False, True), (True, None, False)],
)
def test_the_prompt_is_prepended_unless_streaming(stream: bool | None, exclude: bool | None, echo: bool) -> None:
    tensors = {"stream": stream, "exclude_input_in_output": exclude}
    request, _ = read(text_input="Hi", **{name: value for name, value in tensors.items() if value is not None})
    assert request.echo is echo
    assert request.stream is bool(stream)


def test_streaming_cannot_prepend() -> None:
    with pytest.raises(InvalidRequest, match=r"^\[TW-INPUT\] Error generating stream: When streaming, `exclude"):
        read(text_input="Hi", stream=True, exclude_input_in_output=False)


def test_a_twin_cannot_stream() -> None:
    with pytest.raises(InvalidRequest, match="stream is true"):
        read(text_input="Hi", stream=True, decoupled=False)


@pytest.mark.parametrize("flag", RETURN_FLAGS)
def test_each_flag_asks_for_its_output(flag: str) -> None:
    _, response_format = read(text_input="Hi", **{flag: True})
    is_null = flag == "return_logprobs"
    assert response_format == ResponseFormat(**{flag.removeprefix("return_"): True}, is_logprobs_null=is_null)
    assert read(text_input="Hi", **{flag: False})[1] == ResponseFormat()


def test_sampling_tensors() -> None:
    given: dict[str, Any] = {
        "max_tokens": 5, "min_length": 1, "min_tokens": 2, "end_id": 3, "top_k": 4, "seed": 2**64 - 1,
        "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.1,
        "frequency_penalty": -0.3, "stop_words": ["a", "é"], "bad_words": [""], "stop": ["x"], "ignore_eos": True,
    }  # fmt: skip
    request, _ = read(text_input="Hi", **given)
    assert parameters_of(request) == {"input tensor": given}
    assert type(parameters_of(request)["input tensor"]["max_tokens"]) is int
    assert type(parameters_of(request)["input tensor"]["ignore_eos"]) is bool


def test_every_input_is_read_or_refused() -> None:
    """An input that changes nothing would be accepted and ignored."""
    plain = read(text_input="Hi")
    values: dict[str, Any] = {np.object_: "[1]", np.bool_: True, np.int32: 7, np.uint64: 7, np.float32: 0.5}
    for spec in INPUTS[1:]:
        value = '{"n": 1}' if spec.name == "sampling_parameters" else values[_INPUT_DTYPES[spec.name]]
        try:
            assert read(text_input="Hi", **{spec.name: value}) != plain, spec.name
        except TidewheelError:
            continue


def test_a_number_that_does_not_fit_its_tensor_is_named_as_it_arrived() -> None:
    text = "top_k arrived as -2147483648, and takes nothing below -1. Its tensor is INT32"
    with pytest.raises(InvalidRequest, match=text):
        read(text_input="Hi", top_k=-(2**31))
    assert parameters_of(read(text_input="Hi", top_k=-1)[0]) == {"input tensor": {"top_k": -1}}


def test_json_and_request_parameters() -> None:
    request, _ = read({"top_p": 0.5, "id": "42", "n": 1}, text_input="Hi", sampling_parameters='{"seed": "1"}')
    assert parameters_of(request) == {
        "sampling_parameters": {"seed": "1"},
        "request parameter": {"top_p": 0.5, "n": 1},
    }


def test_a_parameter_that_triton_puts_together_from_two_is_refused() -> None:
    """From a body and its `parameters`, or from a name and the same one with a NUL: one may be that of a proxy."""
    given = InferenceRequest([tensor("text_input", "Hi")], '{"tenant": "acme", "tenant": "other"}', request_id="r")
    with pytest.raises(InvalidRequest, match="parameters has the key 'tenant' twice"):
        read_request(given, FrontendSettings(), decoupled=True, max_prompt_bytes=99, arrival_ns=5)


def test_empty_sampling_parameters() -> None:
    assert read(text_input="Hi", sampling_parameters="")[0].parameters == ()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "character 1"),
        ("[1]", "JSON object"),
        ("null", "JSON object"),
        ('{"n": 1, "n": 2}', "twice"),
        ("[" * 100_000, "deep"),
        ('{"seed": ' + "9" * 5000 + "}", "digits"),
        (b'{"a": "\xff"}', "UTF-8"),
    ],
)
def test_malformed_sampling_parameters(text: Any, word: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"sampling_parameters.*{word}"):
        read(text_input="Hi", sampling_parameters=text)


def test_sizes_are_capped() -> None:
    for tensors, name in (
        ({"text_input": "x" * 1001}, "text_input"),
        ({"messages": "x" * 1001}, "messages"),
        ({"input_ids": [1] * 251}, "input_ids"),
        ({"text_input": "Hi", "sampling_parameters": "x" * (MAX_PARAMETER_BYTES + 1)}, "sampling_parameters"),
        ({"text_input": "Hi", "stop_words": ["x" * MAX_PARAMETER_BYTES]}, "stop_words"),
        ({"text_input": "Hi", "bad_words": [""] * (MAX_PARAMETER_BYTES // 4 + 1)}, "bad_words"),
        ({"text_input": "Hi", "guided_decoding_guide": "x" * MAX_PARAMETER_BYTES}, "guided_decoding_guide"),
    ):
        with pytest.raises(PromptTooLarge, match=rf"{name} has \d+ bytes: at most \d+"):
            read(**tensors)
    assert read(text_input="x" * 1000)[0].text == b"x" * 1000


def test_guided_decoding_is_the_front_ends_to_refuse() -> None:
    request, _ = read(text_input="Hi", guided_decoding_guide_type="json", guided_decoding_guide="")
    assert parameters_of(request)["input tensor"] == {
        "guided_decoding_guide_type": "json",
        "guided_decoding_guide": "",
    }


def test_wrong_shapes_and_bytes() -> None:
    with pytest.raises(InvalidRequest, match="text_input has 2 elements"):
        read(text_input=["a", "b"])
    with pytest.raises(InvalidRequest, match="text_input has 0 elements"):
        read(text_input=[])
    with pytest.raises(InvalidRequest, match=r"stop_words is not valid UTF-8.*byte 1"):
        read(text_input="Hi", stop_words=[b"a\xff"])


def test_the_cumulative_logprob_switches_those_of_the_chosen_tokens_on() -> None:
    request, response_format = read(text_input="Hi", return_cumulative_logprob=True, return_logprobs=True)
    assert parameters_of(request) == {"output flag": {"logprobs": 0}}
    assert response_format.is_logprobs_null


@pytest.mark.parametrize("flag", ["return_logprobs", "return_cumulative_logprob"])
def test_logprobs_that_are_given(flag: str) -> None:
    request, response_format = read(text_input="Hi", sampling_parameters='{"logprobs": 3}', **{flag: True})
    assert parameters_of(request) == {"sampling_parameters": {"logprobs": 3}}
    assert not response_format.is_logprobs_null


def test_logprobs_of_the_prompt() -> None:
    chunk = OutputChunk(
        text="", prompt_ids=[7, 5], prompt_logprobs=[TopLogprobs(-1.5, 3, (9,), (-0.5,))],
        token_texts={5: "n", 7: "o", 9: "m"},
    )  # fmt: skip
    (text,) = several([chunk, chunk], ResponseFormat())["prompt_logprobs"]
    assert json.loads(text) == [
        {"7": {"logprob": None, "rank": None, "decoded_token": "o"}},
        {
            "5": {"logprob": -1.5, "rank": 3, "decoded_token": "n"},
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": "m"},
        },
    ]
    assert "prompt_logprobs" not in several([CHUNK, CHUNK], ResponseFormat())


def test_an_embedding() -> None:
    chunk = OutputChunk(text="", embedding=np.array([0.5, -0.25], np.float32), finish_reason="stop")
    (tensors,) = response_tensors([chunk], ResponseFormat())
    (embedding,) = (tensor.as_numpy() for tensor in tensors if tensor.name() == "embedding")
    assert (embedding.dtype, embedding.tolist()) == (np.float32, [0.5, -0.25])


def test_logprobs_that_are_not_given_are_null() -> None:
    assert parameters_of(read(text_input="Hi", return_logprobs=True)[0]) == {}
    outputs = several([CHUNK, CHUNK], ResponseFormat(logprobs=True, is_logprobs_null=True))
    assert outputs["logprobs"] == [b"null", b"null"]


CHUNK = OutputChunk(
    text="né",
    token_ids=[5, 6],
    logprobs=[
        TopLogprobs(-0.5, 1, (5, 9), (-0.5, float("-inf"))),
        TopLogprobs(-1.5, 3, (), ()),
    ],
    token_texts={5: "n", 6: "é", 9: "m"},
    cumulative_logprob=-2.0,
    num_input_tokens=4,
    finish_reason="length",
    stats=RequestStats(
        arrival_ns=1,
        first_scheduled_ns=2,
        first_token_ns=3,
        last_token_ns=4,
        num_reused_blocks=5,
        num_new_blocks=6,
        num_cached_tokens=64,
        weights="mixed",
        priority=2,
        num_draft_tokens=8,
        num_accepted_draft_tokens=6,
    ),
)
EVERYTHING = ResponseFormat(**{flag.removeprefix("return_"): True for flag in RETURN_FLAGS})


def values(chunk: OutputChunk, response_format: ResponseFormat) -> dict[str, Any]:
    return several([chunk], response_format)


def several(response: Response, response_format: ResponseFormat) -> dict[str, Any]:
    (tensors,) = response_tensors(response, response_format)
    for one in tensors:
        assert one.as_numpy().dtype == _OUTPUT_DTYPES[one.name()], one.name()
        assert one.as_numpy().ndim == len(_OUTPUT_DIMS[one.name()])
    return {one.name(): one.as_numpy().tolist() for one in tensors}


def test_only_text_unless_asked() -> None:
    assert values(CHUNK, ResponseFormat()) == {"text_output": ["né".encode()]}


def test_every_output() -> None:
    outputs = values(CHUNK, EVERYTHING)
    of_speech = values(msgspec.structs.replace(CHUNK, language="en", seconds=(1.0, 2.5, 9.0)), EVERYTHING)
    assert (of_speech.pop("language"), of_speech.pop("audio_seconds")) == ([b"en"], [1.0, 2.5, 9.0])
    assert outputs.keys() == of_speech.keys()
    others = {"prompt_logprobs", "embedding", "language", "audio_seconds"}
    assert outputs.keys() == {spec.name for spec in OUTPUTS} - others
    logprobs = json.loads(outputs.pop("logprobs")[0])
    assert outputs == {
        "text_output": ["né".encode()], "finish_reason": [b"length"], "cumulative_logprob": [-2.0],
        "cum_log_probs": [-2.0], "output_log_probs": [[-0.5, -1.5]],
        "num_input_tokens": [4], "num_output_tokens": [2], "token_ids": [5, 6],
        "arrival_time_ns": [1], "first_scheduled_time_ns": [2], "first_token_time_ns": [3], "last_token_time_ns": [4],
        "kv_cache_reused_blocks": [5], "kv_cache_alloc_new_blocks": [6], "num_cached_tokens": [64], "priority": [2],
        "num_draft_tokens": [8], "num_accepted_draft_tokens": [6],
        "weights": [b"mixed"],
    }  # fmt: skip
    assert logprobs == [
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "n"},
            "9": {"logprob": None, "rank": 2, "decoded_token": "m"},
        },
        {"6": {"logprob": -1.5, "rank": 3, "decoded_token": "é"}},
    ]


def test_the_chosen_token_comes_first_and_once() -> None:
    """Its rank is the place among the likeliest, where ties stand in any order."""
    logprobs = [TopLogprobs(-1.5, 3, (9, 5, 7), (-0.5, -1.5, -1.5))]
    chunk = OutputChunk(text="n", token_ids=[5], logprobs=logprobs, token_texts={5: "n", 7: "o", 9: "m"})
    (entry,) = json.loads(values(chunk, ResponseFormat(logprobs=True))["logprobs"][0])
    assert list(entry.items()) == [
        ("5", {"logprob": -1.5, "rank": 2, "decoded_token": "n"}),
        ("9", {"logprob": -0.5, "rank": 1, "decoded_token": "m"}),
        ("7", {"logprob": -1.5, "rank": 3, "decoded_token": "o"}),
    ]


def test_a_chunk_in_the_middle() -> None:
    outputs = values(OutputChunk(text="", token_ids=[7], num_input_tokens=4), EVERYTHING)
    assert outputs == {
        "text_output": [b""], "finish_reason": [b"None"], "logprobs": [b"[]"],
        "num_input_tokens": [4], "num_output_tokens": [1], "token_ids": [7],
    }  # fmt: skip


def test_a_thread_keeps_the_finish_reasons_of_unfinished_responses() -> None:
    def tensors(*reasons: str | None) -> dict[str, Any]:
        response = [OutputChunk(text="", finish_reason=reason) for reason in reasons]
        (tensors,) = response_tensors(response, ResponseFormat(finish_reason=True))
        return {tensor.name(): tensor for tensor in tensors}

    first, again, two, ended = tensors(None), tensors(None), tensors(None, None), tensors(None, "stop")
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(tensors, None).result()
    assert first["finish_reason"] is again["finish_reason"]
    assert elsewhere["finish_reason"] is not first["finish_reason"]
    assert first["text_output"] is not again["text_output"]
    assert [list(one["finish_reason"].as_numpy()) for one in (first, elsewhere, two, ended)] == [
        [b"None"], [b"None"], [b"None", b"None"], [b"None", b"stop"],
    ]  # fmt: skip


def test_an_element_for_each_sequence() -> None:
    second = msgspec.structs.replace(CHUNK, text="z", token_ids=[9], logprobs=[], stats=None, cumulative_logprob=-3.0)
    outputs = several([CHUNK, second], EVERYTHING)
    del outputs["logprobs"]
    assert outputs == {
        "text_output": ["né".encode(), b"z"], "finish_reason": [b"length", b"length"],
        "cumulative_logprob": [-2.0, -3.0], "cum_log_probs": [-2.0, -3.0],
        "output_log_probs": [[-0.5, -1.5], [0.0, 0.0]], "num_input_tokens": [4], "num_output_tokens": [2, 1],
        "token_ids": [5, 6, 9], "arrival_time_ns": [1, 0], "first_scheduled_time_ns": [2, 0],
        "first_token_time_ns": [3, 0], "last_token_time_ns": [4, 0], "kv_cache_reused_blocks": [5, 0],
        "kv_cache_alloc_new_blocks": [6, 0], "num_cached_tokens": [64, 0], "priority": [2, 0],
        "num_draft_tokens": [8, 0], "num_accepted_draft_tokens": [6, 0],
        "weights": [b"mixed", b"full"],
    }  # fmt: skip


def test_figures_come_when_the_last_sequence_ends() -> None:
    outputs = several([CHUNK, OutputChunk(text="", token_ids=[7], num_input_tokens=4)], EVERYTHING)
    assert "arrival_time_ns" not in outputs
    assert outputs["finish_reason"] == [b"length", b"None"]
    assert len(json.loads(outputs["logprobs"][0])) == 2
    assert outputs["logprobs"][1] == b"[]"


def test_the_timeout_of_triton() -> None:
    request = InferenceRequest([tensor("text_input", "x")], timeout_us=1500)
    assert (
        read_request(request, FrontendSettings(), decoupled=True, max_prompt_bytes=9, arrival_ns=0)[0].timeout_us
        == 1500
    )


def test_text_that_is_no_unicode() -> None:
    assert values(OutputChunk(text="a\ud800"), ResponseFormat()) == {"text_output": [b"a?"]}


def test_a_rendered_template_comes_back_only_when_asked() -> None:
    messages = '[{"role": "user", "content": "Hi"}]'
    assert read(messages=messages)[0].echo is False
    assert read(messages=messages, exclude_input_in_output=False)[0].echo is True
