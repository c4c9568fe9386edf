"""Bad input through the running server: an error with the field, the value and the limit, and no harm done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from faults.conftest import Case
from support.faults.nothing_lost import Recorded, nothing_lost, triton_log
from support.triton.burst import bursting
from support.triton.serving import Server, StreamError, grpc_inputs, grpc_stream

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
    ('{"logprobs": -1}', ["logprobs", "-1", "0"]),
    ('{"n": 1000000000}', ["n", "1000000000"]),
    ('{"n": -1}', ["n", "-1", "1"]),
    ('{"allowed_token_ids": [4096]}', ["allowed_token_ids", "4096", "4095"]),
    ('{"prompt_logprobs": 21}', ["prompt_logprobs", "21", "20"]),
    ('{"allowed_token_ids": []}', ["allowed_token_ids"]),
    ('{"truncate_prompt_tokens": 1000000}', ["truncate_prompt_tokens", "1000000", "-1"]),
    ('{"logit_bias": {"4096": 1}}', ["logit_bias", "4096", "4095"]),
    ('{"max_tokens": 4', ["sampling_parameters"]),
    ("[1, 2]", ["sampling_parameters"]),
    ("[" * 5000, ["sampling_parameters"]),
]
ENDLESS: list[dict[str, Any]] = [
    {"stop": ["x"] * 100_000},
    {"stop": "x" * (1 << 20)},
    {"logit_bias": dict.fromkeys(map(str, range(1_000_000)), 1)},
]
UNSUPPORTED = [
    '{"best_of": 3}',
    '{"chat_template": "{% for a in range(99999) %}{% endfor %}"}',
    '{"chat_template_kwargs": {"tokenize": true}}',
    '{"guided_regex": "(?=a)b"}',
    '{"structured_outputs": {"structural_tag": "{}"}}',
    '{"guided_json": {"not": {"type": "string"}}}',
    '{"guided_decoding_guide_type": "structural_tag"}',
    '{"prompt_embeds": "AAAA"}',
]
# Ids beyond the model's output, by every way in: to a kernel they would be an address.
BAD_IDS: list[dict[str, Any]] = [
    parameters
    for token in (4096, 4097, -1, 2**31 - 1)
    for parameters in ({"stop_token_ids": [token]}, {"end_id": token}, {"logit_bias": {str(token): 100}})
]


ROUNDS = 10  # of 100 requests each
PER_ROUND = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def table(server: Server, recorded: Recorded) -> Iterator[None]:
    """Check once for the whole table: nothing is lost. Allocators keep some of the largest bodies."""
    with nothing_lost(server, recorded, spare_bytes=192 << 20):
        yield


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


@pytest.mark.parametrize("parameters", ENDLESS, ids=short)
def test_lists_without_end(server: Server, parameters: dict[str, Any]) -> None:
    with pytest.raises(StreamError, match=r"\[TW-TOO-LARGE\] sampling_parameters"):
        grpc_stream(server, grpc_inputs("Hello", sampling_parameters=json.dumps(parameters)))


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


def test_ids_beyond_the_model_change_no_neighbour(server: Server, case: Case) -> None:
    with case(), bursting(server) as burst:
        for parameters in BAD_IDS:
            burst.send("Hello", 8, sampling_parameters=json.dumps(parameters))
        for ids in ([5, 4096], [-1], [2**31 - 1] * 8):
            burst.send(ids, 8)
        burst.finish()
        assert len(burst.errors) == burst.num_sent
        assert all(error.startswith("[TW-INPUT]") for error in burst.errors), burst.errors


def test_invalid_utf8_over_grpc(server: Server) -> None:
    inputs = grpc_inputs(text_input=b"caf\xe9")
    with pytest.raises(StreamError, match=r"\[TW-INPUT\].*UTF-8"):
        grpc_stream(server, inputs)


def test_ten_megabytes_over_grpc(server: Server) -> None:
    with pytest.raises(StreamError, match=r"\[TW-TOO-LARGE\]"):
        grpc_stream(server, grpc_inputs("x" * 10_000_000))


def test_ids_of_requests(server: Server) -> None:
    """Two of one id at once, one used again, one with line breaks, and one of a megabyte."""
    ids = ["same", "same", "same", "two\nlines \x1b[31m", "x" * (1 << 20)]
    with bursting(server, num_clients=1) as burst:
        for number, request_id in enumerate(ids):
            burst.tokens[request_id] = []
            inputs = grpc_inputs("The server", max_tokens=4, return_token_ids=True)
            burst.clients[0].async_stream_infer("demo", inputs, request_id=request_id)
            burst.num_sent += 1
            if number == 1:
                burst.finish()
        burst.finish()
        assert burst.errors == []
        assert "\x1b[31m" not in triton_log(server).read_text(errors="replace")


def private_memory(server: Server) -> int:
    """Return that of tritonserver, its front ends and the processes for prompts, in bytes."""
    engine = server.engine_process()
    memory = [process.memory_info() for process in server.descendants() if process != engine]
    return sum(one.rss - one.shared for one in memory)


def refuse_a_hundred(server: Server) -> None:
    with bursting(server) as burst:
        for number in range(60):
            burst.send("Hello", 8, sampling_parameters=BAD_PARAMETERS[number % len(BAD_PARAMETERS)][0])
        burst.finish()
        assert len(burst.errors) == 60
    for number in range(40):
        body = {"text_input": "Hello", "sampling_parameters": BAD_PARAMETERS[number % len(BAD_PARAMETERS)][0]}
        assert server.post("demo/generate", body if number % 4 else b"{").status_code >= 400


@pytest.mark.slow
def test_refusals_take_no_memory(server: Server, case: Case) -> None:
    with case():
        for _ in range(ROUNDS):
            refuse_a_hundred(server)
        before = private_memory(server)
        for _ in range(ROUNDS):
            refuse_a_hundred(server)
        assert private_memory(server) - before < ROUNDS * PER_ROUND
