"""A speech model in the real server: transformers' tokens by HTTP and gRPC; longer audio in windows; bad input."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import wave
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import torch
import transformers
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from support.models import tiny_whisper
from support.models.tiny_models import MARGIN
from support.triton.client_tensors import Array, make_inputs
from support.triton.serving import Server, grpc_stream, sse_events, start_server, stop_without_tensors, wait_ready
from tidewheel.audio_file import SAMPLING_RATE, read_audio
from tidewheel.frontend.speech import cut

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ENTRY = """backend: "tidewheel"
parameters {{ key: "{}" value: {{ string_value: "{}" }} }}
"""
STREAMING_TWIN = ENTRY.format("engine_of", "speech")
TWIN = STREAMING_TWIN + "model_transaction_policy { decoupled: false }\n"
TENSORS = {
    "inputs": [["input", "FP32", ["batch", 576]], ["state", "FP32", [2, "batch", 128]], ["sr", "INT64", [1]]],
    "outputs": [["output", "FP32", ["batch", 1]], ["stateN", "FP32", [2, "batch", 128]]],
}
AXES = {"input": 0, "state": 1, "sr": None, "output": 0, "stateN": 1}
SILERO = importlib.util.find_spec("silero_vad")


def entry(settings: dict[str, object]) -> str:
    return 'backend: "tidewheel"\n' + "".join(
        f"parameters {{ key: {json.dumps(key)} value: {{ string_value: {json.dumps(json.dumps(value))} }} }}\n"
        for key, value in settings.items()
    )


def heard_by(detector: str, twin: str = TWIN) -> str:
    settings = {"voice_activity": detector, "max_audio_s": "60"}.items()
    return twin + "".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n' for key, value in settings
    )


DETECTOR = entry({"adapter_options": TENSORS, "batch_axes": AXES})
SHORT = {"max_tokens": tiny_whisper.NUM_TOKENS}


class Detector(torch.nn.Module):
    """Double of silero-vad: what is loud is speech."""

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002
        state: torch.Tensor,
        sr: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loud = (input[:, 64:].abs().mean(1, keepdim=True) > 0.01).float()
        return loud * (sr == 16000).float(), state + 1


class Sound(NamedTuple):
    samples: Array
    tokens: list[int]
    long_tokens: list[int]  # of `long_audio`


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def sound(folder: Path) -> Sound:
    """Samples that 16 bits hold exactly, whose tokens are clear, also in windows of `long_audio`."""
    model = tiny_whisper.save(folder)
    for seed in range(60):
        samples = (np.round(tiny_whisper.audio(seed, 1.5) * 32000) / 32768).astype(np.float32)
        windows = [window.samples for window in cut(long_audio(samples), 2 * SAMPLING_RATE)]
        alone, *parts = (tiny_whisper.transcribe(model, one) for one in (samples, *windows))
        if min(one.margin for one in (alone, *parts)) >= MARGIN:
            return Sound(samples, alone.tokens, [token for one in parts for token in one.tokens])
    pytest.fail("no clear audio")


@pytest.fixture(scope="module")
def served(sound: Sound, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    settings = ENTRY.format("model", folder) + 'parameters { key: "dtype" value: { string_value: "float32" } }\n'
    entries = {"speech": settings, "speech_whole": TWIN, "detector": DETECTOR, "speech_heard": heard_by("detector")}
    if SILERO is not None:
        entries |= {"silero": entry({"batch_axes": AXES}), "speech_silero": heard_by("silero", STREAMING_TWIN)}
    for name, config in entries.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    torch.jit.script(Detector()).save(repository / "detector" / "1" / "model.pt")
    if SILERO is not None:
        shutil.copy(
            Path(str(SILERO.origin)).parent / "data" / "silero_vad.onnx", repository / "silero" / "1" / "model.onnx"
        )
    log = repository.parent / "speech.log"
    running = wait_ready(start_server("--model-repository", str(repository), log=log, with_gateway=True))
    yield running
    stop_without_tensors(running)


def long_audio(samples: Array) -> Array:
    """Return samples of 1.5 s three times, with pauses: in each window once."""
    return np.concatenate([samples, np.zeros(8_000, np.float32)] * 3)


def times_of(sound: Sound) -> list[tuple[float, ...]]:
    return [window.seconds[:2] for window in cut(long_audio(sound.samples), 2 * SAMPLING_RATE)]


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
        ({"audio_file": np.array([b""], np.object_)}, {}, "audio_file cannot be read"),
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


def test_longer_audio_streams_in_windows(served: Server, sound: Sound) -> None:
    audio = long_audio(sound.samples)
    flags = {"stream": np.array([True]), "return_finish_reason": np.array([True])}
    inputs = make_inputs(tritonclient.grpc, {"audio": audio, **flags})
    results = grpc_stream(served, inputs, model="speech", parameters={"language": "en", **SHORT})
    times = sorted({tuple(result.as_numpy("audio_seconds")[:2].tolist()) for result in results})
    np.testing.assert_allclose(times, times_of(sound), atol=1e-3)
    reasons = [result.as_numpy("finish_reason")[0] for result in results]
    assert set(reasons[:-1]) == {b"None"} and reasons[-1] in (b"stop", b"length")
    assert infer(served, tritonclient.http, {"audio": audio}) == sound.long_tokens


def test_a_model_of_the_server_finds_the_pauses(served: Server, sound: Sound) -> None:
    inputs = make_inputs(tritonclient.grpc, {"audio": long_audio(sound.samples)})
    parameters = {"language": "en", **SHORT}
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        found = client.infer("speech_heard", inputs, parameters=parameters).as_numpy("audio_seconds")
        assert found[1] == pytest.approx(times_of(sound)[-1][1], abs=0.3)
        with pytest.raises(InferenceServerException, match=r"62\.5 s: at most 60 s"):
            client.infer("speech_heard", make_inputs(tritonclient.grpc, {"audio": np.zeros(1_000_000, np.float32)}))


@BOTH
def test_the_language_is_found(served: Server, sound: Sound, folder: Path, module: ModuleType) -> None:
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    wanted = {tiny_whisper.ENGLISH: b"en", tiny_whisper.GERMAN: b"de"}
    url = served.grpc if module is tritonclient.grpc else f"127.0.0.1:{served.http_port}"
    for seed in range(4):
        audio = tiny_whisper.audio(seed, 1.5)
        found = tiny_whisper.detect_language(model, audio)
        with module.InferenceServerClient(url) as client:
            answer = client.infer("speech_whole", make_inputs(module, {"audio": audio}), parameters=SHORT)
        assert found.margin < MARGIN or answer.as_numpy("language")[0] == wanted[found.tokens[0]]


def test_openai_s_client_transcribes(served: Server, sound: Sound) -> None:
    speech = openai.OpenAI(base_url=served.openai + "/v1", api_key="none").audio.transcriptions
    asked = {"model": "speech", "file": ("a.wav", wav(long_audio(sound.samples))), "extra_body": {"max_tokens": 12}}
    whole = speech.create(**asked, language="en", response_format="verbose_json")
    assert whole.language == "en" and whole.duration == pytest.approx(6.0)
    np.testing.assert_allclose([(one.start, one.end) for one in whole.segments], times_of(sound), atol=1e-3)
    assert "".join(one.text for one in whole.segments) == whole.text
    *deltas, done = speech.create(**asked, language="en", stream=True)
    assert done.text == whole.text == "".join(event.delta for event in deltas)
    for file in (b"", b"no sound"):
        with pytest.raises(openai.BadRequestError, match="file cannot be read"):
            speech.create(model="speech", file=("a.wav", file))


def spoken(text: str, path: Path) -> Array:
    """Return samples of espeak-ng's voice, as floats at 16 kHz."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    subprocess.run(["espeak-ng", "-w", str(path), text], check=True)
    return read_audio(path.read_bytes(), 60.0)


def test_spoken_sentences_are_cut_between_words(served: Server, tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    text = "The first sentence is short. Here comes a second one. And this is the third and last."
    spoken(text, path)
    speech = openai.OpenAI(base_url=served.openai + "/v1", api_key="none").audio.transcriptions
    answer = speech.create(model="speech", file=path, response_format="verbose_json", extra_body={"max_tokens": 2})
    assert len(answer.segments) >= 3 and answer.language in ("en", "de")


@pytest.mark.skipif(SILERO is None, reason="pip install --no-deps silero-vad")
def test_silero_hears_nobody_in_loud_noise(served: Server, tmp_path: Path) -> None:
    voice = spoken("Somebody speaks here for a while.", tmp_path / "voice.wav")
    noise = 0.01 * np.random.default_rng(0).standard_normal(6 * SAMPLING_RATE).astype(np.float32)
    file = ("a.wav", wav(np.concatenate([voice, noise, voice])))
    speech = openai.OpenAI(base_url=served.openai + "/v1", api_key="none").audio.transcriptions
    silent_from, silent_to = len(voice) / SAMPLING_RATE, (len(voice) + len(noise)) / SAMPLING_RATE

    def num_in_noise(model: str) -> int:
        answer = speech.create(model=model, file=file, response_format="verbose_json", language="en")
        assert answer.segments[0].start == 0.0 and answer.segments[-1].end == pytest.approx(answer.duration)
        return sum(silent_from < one.start and one.end < silent_to for one in answer.segments)

    assert num_in_noise("speech_silero") == 0 < num_in_noise("speech")
