"""Calls of another model: tensors are handed on as they are, and whatever happens is one report."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from support.triton import fake_triton
from support.triton.fake_triton import InferenceRequest, InferenceResponse, Tensor, TritonError
from tidewheel.adapter.model_calls import CalledModel, ModelCall
from tidewheel.adapter.one_shot import one_shot_settings, read_tensors, signature_of
from tidewheel.adapter.responder import TritonSink
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError, PromptTooLarge, TidewheelError
from tidewheel.frontend.output import OutputChunk
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.one_shot.adapters import with_kind

LIMIT_S = 30
TENSORS = {"inputs": [["x", "FP32", ["x.0"]]], "outputs": [["y", "FP32", ["y.0", 2]]]}
GOOD = np.ones((1, 2), np.float32)


class Called:
    """What `pb_utils.InferenceRequest` is for a call; `answer` is returned or raised."""

    answer: ClassVar[Any] = None
    asked: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **fields: Any) -> None:
        self.asked.append(fields)

    def exec(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_triton, "InferenceRequest", Called)
    Called.asked.clear()


def config(**settings: Any) -> EngineConfig:
    given = {"model": "other", "adapter": "triton", "adapter_options": json.dumps(TENSORS), **settings}
    return EngineConfig.from_settings(with_kind(given))


def called(answer: Any, *, discard: bool = False, **settings: Any) -> tuple[ModelCall, TidewheelError | None]:
    Called.answer = answer
    call = ModelCall(CalledModel(config(**settings)), InferenceRequest([Tensor("x", np.ones(3))], request_id="r"))
    if discard:
        call.discard()
    reports: list[TidewheelError | None] = []
    ended = threading.Event()
    call.start(lambda error: (reports.append(error), ended.set()))
    assert ended.wait(LIMIT_S)
    call._model.threads.shutdown()
    (report,) = reports
    return call, report


def test_tensors_are_handed_on_without_a_copy() -> None:
    y = Tensor("y", GOOD)
    call, error = called(InferenceResponse([y]))
    assert error is None and call.outputs == {"y": y}
    (asked,) = Called.asked
    assert (asked["model_name"], asked["requested_output_names"], asked["request_id"]) == ("other", ["y"], "r")
    sink = TritonSink(sender := InferenceRequest([]).sender)
    sink.send([OutputChunk(text="", tensors=call.outputs, finish_reason="length")])
    assert sender.sent[0][0].output_tensors()[0] is y
    call.discard()
    assert call.outputs is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (InferenceResponse(error=TritonError("bad\nvalue")), ["TW-MODEL", "other", "bad value"]),
        (InferenceResponse(error=TritonError("[request id: r] Exceeds maximum queue size")), ["TW-BUSY", "maximum"]),
        (InferenceResponse(error=TritonError("Request timeout expired")), ["TW-BUSY", "timeout"]),
        (ValueError("no such model"), ["TW-MODEL", "no such model"]),
        (InferenceResponse([Tensor("z", GOOD)]), ["TW-MODEL", "y"]),
        (InferenceResponse([Tensor("y", GOOD[0])]), ["TW-MODEL", "FP32 [2]", "y FP32 [y.0, 2]"]),
        (InferenceResponse([Tensor("y", np.ones((1, 2)))]), ["TW-MODEL", "FP64 [1, 2]"]),
        (InferenceResponse([Tensor("y", GOOD * np.nan)]), ["TW-NUMERIC", "output y"]),
    ],
)
def test_whatever_happens_is_one_report(answer: Any, words: list[str]) -> None:
    call, error = called(answer)
    assert error is not None and call.outputs is None
    assert all(word in f"{error.tag} {error.message}" for word in words), error


def test_numbers_may_be_anything_where_that_is_set() -> None:
    assert called(InferenceResponse([Tensor("y", GOOD * np.nan)]), check_finite=False)[1] is None


def test_a_request_that_was_answered_meanwhile_is_not_called() -> None:
    call, error = called(InferenceResponse([Tensor("y", GOOD)]), discard=True)
    assert error is None and call.outputs is None and not Called.asked


def test_the_message_has_shapes_alone_and_large_inputs_are_refused() -> None:
    request = InferenceRequest([Tensor("x", np.ones((2, 3), np.float32)), Tensor("s", np.array([b"a"], np.object_))])
    call = ModelCall(CalledModel(config()), request)
    found = read_tensors(request, FrontendSettings(), 1, 7, call)
    assert found.call is call and (found.inputs.data, found.inputs.file) == (b"", "")
    assert [(each.name, each.dtype, each.shape) for each in found.inputs.tensors] == [
        ("x", "FP32", (2, 3)),
        ("s", "BYTES", (1,)),
    ]
    with pytest.raises(PromptTooLarge, match="max_input_mb"):
        read_tensors(InferenceRequest([Tensor("x", np.ones(1 << 18))]), FrontendSettings(), 1, 0, call)


def declared(max_batch_size: int, data_type: str, *dims: int) -> dict[str, Any]:
    tensor = {"data_type": data_type, "dims": list(dims)}
    return {"max_batch_size": max_batch_size, "input": [{"name": "x", **tensor}], "output": [{"name": "y", **tensor}]}


def settings_of(folder: Path, model: str = "other", **fields: Any) -> EngineConfig | None:
    (folder / "mine" / "1").mkdir(parents=True, exist_ok=True)
    parameters = {"adapter": {"string_value": "triton"}, "model": {"string_value": model}}
    return one_shot_settings({"name": "mine", "parameters": parameters, **fields}, folder / "mine")


def write_called(folder: Path, text: str) -> None:
    (folder / "other" / "1").mkdir(parents=True)
    (folder / "other" / "config.pbtxt").write_text(text)


def test_tensors_are_those_of_the_called_model_or_of_the_entry(tmp_path: Path) -> None:
    io = '{ name: "%s" data_type: TYPE_STRING dims: [ -1, 3 ] }\n'
    write_called(tmp_path, 'backend: "python"\nmax_batch_size: 4\ninput ' + io % "a" + "output " + io % "b")
    found = settings_of(tmp_path)
    assert found is not None and json.loads(found.adapter_options) == {
        "inputs": [["a", "BYTES", ["a.0", "a.1", 3]]],
        "outputs": [["b", "BYTES", ["b.0", "b.1", 3]]],
    }
    found = settings_of(tmp_path, **declared(0, "TYPE_FP32", -1, 4))
    assert found is not None and json.loads(found.adapter_options)["inputs"] == [["x", "FP32", ["x.0", 4]]]


def test_what_cannot_be_known_is_one_line(tmp_path: Path) -> None:
    write_called(tmp_path, 'platform: "onnxruntime_onnx"\n')
    for model in ("other", "nowhere"):
        settings = settings_of(tmp_path, model)
        assert settings is not None
        with pytest.raises(ConfigError, match="declare both"):
            signature_of(settings)
    with pytest.raises(ConfigError, match="itself"):
        settings_of(tmp_path, "mine")
