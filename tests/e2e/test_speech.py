"""A speech model in the real server: transformers' tokens by HTTP and gRPC; one line for what is no audio."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from support.models import tiny_whisper
from support.models.tiny_models import MARGIN
from support.triton.client_tensors import Array, make_inputs
from support.triton.serving import Server, grpc_stream, sse_events, start_server, stop_without_tensors, wait_ready

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ENTRY = """backend: "tidewheel"
parameters {{ key: "{}" value: {{ string_value: "{}" }} }}
"""
TWIN = ENTRY.format("engine_of", "speech") + "model_transaction_policy { decoupled: false }\n"
SHORT = {"max_tokens": tiny_whisper.NUM_TOKENS}


class Sound(NamedTuple):
    samples: Array
    tokens: list[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def sound(folder: Path) -> Sound:
    """Samples that 16 bits hold exactly, whose tokens are clear."""
    model = tiny_whisper.save(folder)
    for seed in range(10):
        samples = (np.round(tiny_whisper.audio(seed, 1.5) * 32000) / 32768).astype(np.float32)
        answer = tiny_whisper.transcribe(model, samples)
        if answer.margin >= MARGIN:
            return Sound(samples, answer.tokens)
    pytest.fail("no clear audio")


@pytest.fixture(scope="module")
def served(sound: Sound, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    settings = ENTRY.format("model", folder) + 'parameters { key: "dtype" value: { string_value: "float32" } }\n'
    for name, entry in (("speech", settings), ("speech_whole", TWIN)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(entry)
    log = repository.parent / "speech.log"
    running = wait_ready(start_server("--model-repository", str(repository), log=log))
    yield running
    stop_without_tensors(running)


def wav(samples: Array, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes((samples * 32768).astype("<i2").tobytes())
    return file.getvalue()


def infer(server: Server, module: ModuleType, arrays: dict[str, Array], **parameters: Any) -> list[int]:
    url = server.grpc if module is tritonclient.grpc else f"127.0.0.1:{server.http_port}"
    inputs = make_inputs(module, {"return_token_ids": np.array([True]), **arrays})
    with module.InferenceServerClient(url) as client:
        answer = client.infer("speech_whole", inputs, parameters={"language": "en", **SHORT, **parameters})
    return answer.as_numpy("token_ids").tolist()


BOTH = pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])


@BOTH
def test_samples_and_files_give_the_tokens_of_transformers(served: Server, sound: Sound, module: ModuleType) -> None:
    assert infer(served, module, {"audio": sound.samples}) == sound.tokens
    assert infer(served, module, {"audio_file": np.array([wav(sound.samples)], np.object_)}) == sound.tokens


def test_text_streams_as_it_comes(served: Server, sound: Sound) -> None:
    flags = {"stream": np.array([True]), "return_token_ids": np.array([True])}
    inputs = make_inputs(tritonclient.grpc, {"audio": sound.samples, **flags})
    results = grpc_stream(served, inputs, model="speech", parameters={"language": "en", **SHORT})
    assert [token for result in results for token in result.as_numpy("token_ids").tolist()] == sound.tokens
    body = {"audio": sound.samples.tolist(), "stream": True, "return_token_ids": True, "language": "en", **SHORT}
    events = sse_events(served.post("speech/generate_stream", body, stream=True))
    tokens = [event.get("token_ids", []) for event in events]
    assert [t for each in tokens for t in (each if isinstance(each, list) else [each])] == sound.tokens


@BOTH
@pytest.mark.parametrize(
    ("arrays", "parameters", "words"),
    [
        ({"audio": np.zeros(1_500_000, np.float32)}, {}, "max_prompt_bytes"),
        ({"audio": np.array([np.inf], np.float32)}, {}, "must lie in -1 to 1"),
        ({"audio_file": np.array([b"no sound"], np.object_)}, {}, "audio_file cannot be read"),
        ({"audio_file": np.array([wav(np.zeros(2_000_000), 1000)], np.object_)}, {}, "2,000.0 s: at most 1,800 s"),
        ({"audio": np.zeros(8, np.float32)}, {"language": "xx"}, "language is 'xx'"),
        (
            {"text_input": np.array([b"text"], np.object_)},
            {},
            "audio, audio_file: the request has text_input",
        ),
    ],
)
def test_what_is_no_audio_is_refused_in_one_line(
    served: Server, sound: Sound, module: ModuleType, arrays: dict[str, Array], parameters: Any, words: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        infer(served, module, arrays, **parameters)
    assert words in caught.value.message() and "\n" not in caught.value.message().strip()
    assert infer(served, module, {"audio": sound.samples}) == sound.tokens
