"""Bad input through the running server: an error with the field, the value and the limit, and no harm done."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import requests

from support.triton.serving import Server, StreamError, grpc_inputs, grpc_stream, texts

pytestmark = pytest.mark.e2e

# (sampling parameters as JSON text, words that the error must hold)
BAD_PARAMETERS: list[tuple[str, list[str]]] = [
    ('{"max_tokens": 0}', ["max_tokens", "0", "1"]),
    ('{"max_tokens": -1}', ["max_tokens", "-1"]),
    ('{"max_tokens": 6000, "min_tokens": 5000}', ["min_tokens", "5000", "1024"]),
    ('{"max_tokens": "many"}', ["max_tokens", "many"]),
    ('{"max_tokens": {"a": 1}}', ["max_tokens"]),
    ('{"temperature": NaN}', ["temperature"]),
    ('{"temperature": 1e999}', ["temperature"]),
    ('{"temperature": -0.5}', ["temperature", "-0.5"]),
    ('{"top_p": 0}', ["top_p", "0"]),
    ('{"top_p": 1.5}', ["top_p", "1.5", "1"]),
    ('{"repetition_penalty": 0}', ["repetition_penalty"]),
    ('{"presence_penalty": 9}', ["presence_penalty", "9"]),
    ('{"frequency_penalty": -9}', ["frequency_penalty", "-9"]),
    ('{"temprature": 1}', ["temprature", "temperature"]),
    ('{"seed": 18446744073709551616}', ["seed"]),
    ('{"stop_token_ids": [4096]}', ["stop_token_ids", "4096", "4095"]),
    ('{"stop": [""]}', ["stop", "empty string"]),
    ('{"logit_bias": {"-1": 1}}', ["logit_bias", "-1"]),
    ('{"logprobs": 1000000000}', ["logprobs", "1000000000", "20"]),
    ('{"max_tokens": 4', ["sampling_parameters"]),
    ("[1, 2]", ["sampling_parameters"]),
    ("[" * 5000, ["sampling_parameters"]),
]
UNSUPPORTED = ['{"best_of": 3}', '{"guided_json": {}}', '{"prompt_logprobs": 1}', '{"prompt_embeds": "AAAA"}']


def short(value: Any) -> str:
    return str(value)[:32]


@pytest.mark.parametrize(("parameters", "words"), BAD_PARAMETERS, ids=short)
def test_over_grpc(server: Server, parameters: str, words: list[str]) -> None:
    with pytest.raises(StreamError) as error:
        grpc_stream(server, grpc_inputs("Hello", sampling_parameters=parameters))
    assert str(error.value).startswith("[TW-INPUT]"), error.value
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("parameters", "words"), BAD_PARAMETERS, ids=short)
@pytest.mark.parametrize("path", ["demo/generate", "demo/generate_stream"])
def test_over_http(server: Server, path: str, parameters: str, words: list[str]) -> None:
    response = server.post(path, {"text_input": "Hello", "sampling_parameters": parameters})
    assert response.status_code == 400
    for word in ["[TW-INPUT]", *words]:
        assert word in response.text


@pytest.mark.parametrize("parameters", UNSUPPORTED)
def test_unsupported_is_refused_by_name(server: Server, parameters: str) -> None:
    name = next(iter(json.loads(parameters)))
    with pytest.raises(StreamError, match=rf"\[TW-UNSUPPORTED\].*{name}"):
        grpc_stream(server, grpc_inputs("Hello", sampling_parameters=parameters))


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"text_input": ""}, "text_input"),
        ({}, "text_input"),
        ({"text_input": "word " * 3000}, "1024"),
        ({"text_input": "x" * 10_000_000}, "bytes"),
        ({"text_input": "Hi", "temprature": 1}, "temprature"),
        ({"text_input": "Hi", "input_ids": [5, 6]}, "input_ids"),
        ({"input_ids": [5, 4096]}, "4096"),
        ({"input_ids": [-1]}, "-1"),
        ({"messages": "not json"}, "messages"),
        ({"messages": '[{"role": "user"}]'}, "content"),
        ({"text_input": "Hi", "stream": True, "exclude_input_in_output": False}, "exclude_input_in_output"),
        ({"text_input": "Hi", "max_tokens": 4, "sampling_parameters": '{"max_tokens": 5}'}, "max_tokens"),
    ],
    ids=short,
)
def test_bad_bodies(server: Server, body: dict[str, Any], word: str) -> None:
    response = server.post("demo/generate", body)
    assert response.status_code == 400
    assert word in response.text


def test_invalid_utf8_over_grpc(server: Server) -> None:
    inputs = grpc_inputs(text_input=b"caf\xe9")
    with pytest.raises(StreamError, match=r"\[TW-INPUT\].*UTF-8"):
        grpc_stream(server, inputs)


def test_ten_megabytes_over_grpc(server: Server) -> None:
    with pytest.raises(StreamError, match=r"\[TW-TOO-LARGE\]"):
        grpc_stream(server, grpc_inputs("x" * 10_000_000))


def test_malformed_http_bodies(server: Server) -> None:
    for body in (b"{", b"[" * 200, b'{"text_input": 5}', b'{"text_input": ["a", "b"]}'):
        assert server.post("demo/generate", body).status_code in (400, 500)  # Triton's own answers, both seen
    assert requests.get(f"{server.http}/v2/health/live", timeout=5).status_code == 200


def test_neighbours_notice_nothing(
    server: Server, reference: Callable[[str, int], tuple[list[int], list[int], str]]
) -> None:
    greedy = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 60, "ignore_eos": True}
    expected = reference("Databases are", 60)[2]
    assert server.generate("Databases are", **greedy)["text_output"] == "Databases are" + expected
    inputs = grpc_inputs("Databases are", stream=True, exclude_input_in_output=True, **greedy)
    for parameters, _ in BAD_PARAMETERS[:8]:
        with pytest.raises(StreamError):
            grpc_stream(server, grpc_inputs("Hello", sampling_parameters=parameters))
    assert "".join(texts(grpc_stream(server, inputs))) == expected
