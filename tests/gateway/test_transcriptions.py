"""Speech behind the gateway: `/v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

import json
import socket
from typing import Any

import openai
import pytest
import requests

from support.gateway.running_gateway import RunningGateway, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, response

SOUND = bytes(range(256)) * 40 + b"\r\n--\r\n"
FILE = ("speech.wav", SOUND)


def say_two(asked: Asked) -> Answer:
    for begin, (text, reason) in enumerate(((" Hello", "None"), (" you.", "stop"))):
        counts = {"num_input_tokens": ("UINT32", "I", [4]), "num_output_tokens": ("UINT32", "I", [2])}
        times = {"language": "en", "audio_seconds": ("FP32", "f", [begin, begin + 1, 9])}
        yield response(asked.message, text_output=text, finish_reason=reason, **counts, **times)


@pytest.fixture(autouse=True)
def _speaking(triton: FakeTriton) -> None:
    triton.answer = say_two


def transcribe(
    gateway: RunningGateway, path: str = "transcriptions", file: Any = FILE, **fields: Any
) -> requests.Response:
    data = {"model": "demo", **fields}
    files = {} if file is None else {"file": file}
    if not files:
        files, data = {name: (None, value) for name, value in data.items()}, {}
    return gateway.session.post(f"{gateway.url}/v1/audio/{path}", data=data, files=files, timeout=30)


def file_of(asked: Asked) -> bytes:
    pairs = zip(asked.message.inputs, asked.message.raw_input_contents, strict=True)
    return next(raw[4:] for tensor, raw in pairs if tensor.name == "audio_file")


def sampling_of(asked: Asked) -> dict[str, Any]:
    pairs = zip(asked.message.inputs, asked.message.raw_input_contents, strict=True)
    return json.loads(next(raw[4:] for tensor, raw in pairs if tensor.name == "sampling_parameters"))


def test_the_file_goes_to_the_backend_as_it_is(gateway: RunningGateway, triton: FakeTriton) -> None:
    answer = transcribe(gateway, language="en", temperature="0.2", priority="2", user="me")
    assert answer.headers["x-request-id"] == triton.asked[0].message.id
    usage = {"type": "tokens", "input_tokens": 4, "output_tokens": 4, "total_tokens": 8}
    assert answer.json() == {"text": " Hello you.", "language": "en", "usage": usage}
    assert file_of(triton.asked[0]) == SOUND
    assert sampling_of(triton.asked[0]) == {"language": "en", "temperature": "0.2", "priority": "2"}
    transcribe(gateway, "translations")
    assert sampling_of(triton.asked[1]) == {"translate": True}


def test_formats(gateway: RunningGateway) -> None:
    text = transcribe(gateway, response_format="text")
    assert text.headers["Content-Type"] == "text/plain; charset=utf-8" and text.text == " Hello you.\n"
    verbose = transcribe(gateway, response_format="verbose_json", stream="False").json()
    assert (verbose["task"], verbose["language"], verbose["text"]) == ("transcribe", "en", " Hello you.")
    assert verbose["duration"] == 9
    assert verbose["segments"] == [
        {"id": 0, "start": 0, "end": 1, "text": " Hello"}, {"id": 1, "start": 1, "end": 2, "text": " you."}
    ]  # fmt: skip


def test_openai_s_client_streams(gateway: RunningGateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
    with client.audio.transcriptions.create(model="demo", file=FILE, stream=True) as stream:
        first, second, done = list(stream)
    assert (first.type, first.delta, second.delta) == ("transcript.text.delta", " Hello", " you.")
    assert (done.type, done.text, done.usage.total_tokens) == ("transcript.text.done", " Hello you.", 8)
    assert client.audio.translations.create(model="demo", file=FILE).text == " Hello you."


def test_an_answer_that_was_cut_says_so(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, finish_reason="deadline")
    assert transcribe(gateway).json()["finish_reason"] == "deadline"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"file": None}, "file", "file is missing"),
        ({"file": None, "response_format": "json"}, "file", "file is missing"),
        ({"file": (None, "speech.wav")}, "file", "file is text: upload a file"),
        ({"response_format": "srt"}, "response_format", "srt"),
        ({"stream": "maybe"}, "stream", "stream: Expected `bool`"),
        ({"n": "2"}, "n", "n is set"),
        ({"timestamp_granularities[]": ["segment", "word"]}, None, "twice"),
        ({f"field{i}": "1" for i in range(70)}, None, "1 to 64 fields"),
        ({"model": "other"}, "model", "served is demo"),
    ],
)
def test_bad_forms(gateway: RunningGateway, triton: FakeTriton, fields: Any, param: str | None, words: str) -> None:
    answer = transcribe(gateway, **fields)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert words in error["message"] and "\n" not in error["message"]
    assert error["param"] == param and triton.asked == []


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("application/json", b"{}", "send multipart/form-data"),
        ("multipart/form-data", b"x", "boundary"),
        ("multipart/form-data; boundary=x", b"no form", "no form that can be read"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\ncut', "form"),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nnameless\r\n--x--\r\n", "each with its name"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Type: multipart/mixed; boundary=y\r\n\r\n", "its name"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--x--',
            "utf",
        ),
        ("multipart/form-data; boundary=x", b"--x--\r\n", "file is missing"),
    ],
)
def test_bodies_that_are_no_form(
    gateway: RunningGateway, triton: FakeTriton, kind: str, body: bytes, words: str
) -> None:
    answer = gateway.post("audio/transcriptions", body, headers={"Content-Type": kind})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"] and triton.asked == []


def test_a_form_that_says_it_is_too_large_is_not_read(gateway: RunningGateway) -> None:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: 9999999999\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_a_form_of_unknown_length_is_read_up_to_the_limit(gateway: RunningGateway, triton: FakeTriton) -> None:
    def body() -> Any:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(40):
            yield b"s" * (1 << 15)
        yield b"\r\n--x--\r\n"

    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    answer = gateway.session.post(f"{gateway.url}/v1/audio/transcriptions", data=body(), headers=kind, timeout=30)
    assert answer.status_code == 413
    assert "--max-body-mb" in answer.json()["error"]["message"] and triton.asked == []


def test_errors_of_the_backend_name_the_form_s_field(gateway: RunningGateway, triton: FakeTriton) -> None:
    triton.refuse_and_listen("[TW-TOO-LARGE] audio_file has 5000000 bytes: at most 4194304 are allowed")
    error = transcribe(gateway).json()["error"]
    assert error["message"].startswith("file has 5000000 bytes") and error["param"] == "file"
