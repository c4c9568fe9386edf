"""The baseline as Triton calls it: a batch of requests in, a response each out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.triton import fake_triton
from support.triton.fake_triton import InferenceRequest, InferenceResponse, Tensor
from support.triton.serving import REPOSITORY, WEIGHTS
from tidewheel.bench.batch_generator import Generator, Row
from tidewheel.bench.transformers_baseline import TransformersBaseline

Reply = dict[str, Any]


class TritonPythonModel(TransformersBaseline):
    triton = fake_triton


@pytest.fixture
def model(generator: Generator) -> Iterator[TritonPythonModel]:
    fake_triton.Logger.lines.clear()
    one = TritonPythonModel()
    one._generator = generator
    yield one


def arguments(folder: Path, **parameters: str) -> dict[str, str]:
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "model_repository": str(folder),
        "model_version": "1",
        "model_name": "baseline",
    }


def request(parameters: str = "", **inputs: Any) -> InferenceRequest:
    """Values become tensors with a batch dimension of one, unless they are tensors."""
    return InferenceRequest([_tensor(name, value) for name, value in inputs.items()], parameters)


def _tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        return Tensor(name, value)
    kind: Any = {str: np.object_, bool: np.bool_}.get(type(value), np.int32)
    return Tensor(name, np.array([[value.encode()]] if isinstance(value, str) else np.atleast_2d(value), dtype=kind))


def reply(response: InferenceResponse) -> Reply:
    assert response.error() is None, response.error().message()
    arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
    assert all(array.shape[0] == 1 for array in arrays.values())
    return {name: array[0].tolist() for name, array in arrays.items()}


def error(response: InferenceResponse) -> tuple[int, str]:
    assert not response.output_tensors()
    return response.error().code(), response.error().message()


def test_text_and_ids_in_one_batch(model: TritonPythonModel, generator: Generator) -> None:
    ids = generator.encode("A tuple is")
    text, same = map(
        reply,
        model.execute(
            [request(text_input="A tuple is", max_tokens=7, ignore_eos=True), request(input_ids=ids, max_tokens=4)]
        ),
    )
    assert text["num_input_tokens"] == same["num_input_tokens"] == [len(ids)]
    assert text["token_ids"][:4] == same["token_ids"]
    assert (text["num_output_tokens"], same["num_output_tokens"]) == ([7], [4])
    assert text["text_output"][0].decode() == generator._tokenizer.decode(text["token_ids"])
    assert text["finish_reason"] == [b"length"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(max_tokens=4), "just one of text_input and input_ids"),
        (request(text_input="a", input_ids=[5], max_tokens=4), "just one"),
        (request(text_input="a", max_tokens=0), "max_tokens is 0"),
        (request(text_input="a", max_tokens=[4, 5]), "max_tokens has 2 elements"),
        (request(input_ids=np.array([[4], [5]], dtype=np.int32), max_tokens=4), "input_ids has 2 rows"),
        (request(text_input=np.array([[b"\xff"]], dtype=np.object_), max_tokens=4), "UTF-8"),
        (request('{"temperature": 0.5}', text_input="a", max_tokens=4), "temperature is unknown"),
    ],
)
def test_a_bad_request_costs_nobody_else(model: TritonPythonModel, bad: InferenceRequest, words: str) -> None:
    good = request('{"id": "7"}', text_input="A tuple is", max_tokens=3)
    first, second, third = model.execute([good, bad, good])
    assert reply(first) == reply(third)
    code, message = error(second)
    assert code == fake_triton.TritonError.INVALID_ARG
    assert message.startswith("[TW-") and words in message


def test_a_batch_that_fails_answers_everybody(
    model: TritonPythonModel, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(rows: list[Row]) -> None:
        raise RuntimeError("no memory left")

    good, bad = request(text_input="A tuple is", max_tokens=3), request(text_input="a", max_tokens=0)
    with monkeypatch.context() as patch:
        patch.setattr(generator, "generate", fail)
        codes = [error(response)[0] for response in model.execute([good, bad, good])]
    internal = fake_triton.TritonError.INTERNAL
    assert codes == [internal, fake_triton.TritonError.INVALID_ARG, internal]
    assert any("no memory left" in line for level, line in fake_triton.Logger.lines if level == "error")
    assert reply(model.execute([good])[0])["num_output_tokens"] == [3]


def test_settings_are_those_of_the_entry() -> None:
    model = TritonPythonModel()
    parameters = {"model": "../../demo/1/weights", "dtype": "float32", "FORCE_CPU_ONLY_INPUT_TENSORS": "yes"}
    model.initialize(arguments(REPOSITORY / "baseline_dynamic", **parameters))
    assert reply(model.execute([request(text_input="A tuple is", max_tokens=3)])[0])["num_output_tokens"] == [3]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"model": str(WEIGHTS), "max_num_seqs": "8"}, "max_num_seqs is no setting of a baseline"),
        ({"model": "../nowhere"}, "nowhere"),
        ({}, "model is not set"),
        ({"model": str(WEIGHTS), "dtype": "int8"}, "dtype"),
    ],
)
def test_a_wrong_setting_stops_the_load(tmp_path: Path, parameters: dict[str, str], words: str) -> None:
    with pytest.raises(fake_triton.TritonModelException, match=words):
        TritonPythonModel().initialize(arguments(tmp_path, **parameters))
