"""One-shot models in Triton: what is added to their configuration, and their requests and responses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.triton.fake_triton import InferenceRequest, ModelConfig, Tensor
from support.triton.serving import wait_for
from tidewheel.adapter import one_shot
from tidewheel.adapter.one_shot import complete, find_entry, one_shot_settings, read_tensors, signature_of
from tidewheel.adapter.responder import TritonSink
from tidewheel.errors import ConfigError, PromptTooLarge
from tidewheel.frontend.output import OutputChunk
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.one_shot.signature import Signature, TensorSpec
from tidewheel_process.process_tree import arguments

SIGNATURE = Signature(
    (TensorSpec("image", "FP32", ("N", 3, "H")), TensorSpec("text", "BYTES", ("N", 1))),
    (TensorSpec("classes", "FP32", ("N", 10)),),
).with_settings({}, {})


def declared(name: str, data_type: str, dims: list[int]) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": dims}


def test_an_empty_entry_gets_the_tensors_of_the_file_and_answers_once() -> None:
    entry = complete(ModelConfig({"name": "m"}), SIGNATURE).as_dict()
    assert entry["input"] == [declared("image", "TYPE_FP32", [-1, 3, -1]), declared("text", "TYPE_STRING", [-1, 1])]
    assert entry["output"] == [declared("classes", "TYPE_FP32", [-1, 10])]
    assert entry["model_transaction_policy"] == {"decoupled": False} and entry["max_batch_size"] == 0


def test_with_max_batch_size_the_batch_is_left_out() -> None:
    known = declared("image", "TYPE_FP32", [3, 224])
    entry = complete(ModelConfig({"name": "m", "max_batch_size": 8, "input": [known]}), SIGNATURE).as_dict()
    assert entry["input"] == [known, declared("text", "TYPE_STRING", [1])]
    assert entry["output"] == [declared("classes", "TYPE_FP32", [10])]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"input": [declared("imgae", "TYPE_FP32", [-1, 3, -1])]}, ["imgae", "image"]),
        ({"input": [declared("image", "TYPE_FP64", [-1, 3, -1])]}, ["image", "TYPE_FP64", "TYPE_FP32"]),
        ({"output": [declared("classes", "TYPE_FP32", [-1, 11])]}, ["classes", "[-1, 11]", "[-1, 10]"]),
        ({"output": [declared("classes", "TYPE_FP32", [10])]}, ["classes", "[10]"]),
    ],
)
def test_contradictions_are_one_line(entry: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        complete(ModelConfig({"name": "m", **entry}), SIGNATURE)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words)


def test_a_batch_size_needs_a_batch_in_all_tensors() -> None:
    one = Signature(SIGNATURE.inputs, (TensorSpec("n", "INT64", ("N",), 0),))
    with pytest.raises(ConfigError, match="max_batch_size is 4"):
        complete(ModelConfig({"name": "m", "max_batch_size": 4}), one)


@pytest.mark.parametrize("form", ["--model-repository={}", "--model-repository {}"])
def test_an_entry_is_found_by_the_arguments_of_the_server(form: str, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    command = [sys.executable, "-c", "input()", *form.format(tmp_path).split()]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        wait_for(lambda: str(tmp_path) in " ".join(arguments(server.pid)), 30, "its command line")
        assert find_entry("m", server.pid) == tmp_path / "m" and find_entry("n", server.pid) is None
        server.communicate(b"\n")


def test_an_entry_is_one_shot_by_its_file_or_a_setting(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    config: dict[str, Any] = {"name": "m", "max_batch_size": 4}
    assert one_shot_settings(config, folder) is None
    (folder / "1" / "model.onnx").touch()
    settings = one_shot_settings(config, folder)
    assert settings is not None and settings.model == str(folder / "1" / "model.onnx")
    assert settings.max_num_batched_tokens == 4
    assert one_shot_settings({**config, "parameters": {"engine_of": {"string_value": "n"}}}, folder) is None
    with pytest.raises(ConfigError, match="bukets"):
        one_shot_settings({**config, "parameters": {"bukets": {"string_value": "{}"}}}, folder)


def test_a_signature_is_read_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    from support.one_shot.onnx_files import scaled

    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(scaled())
    settings = one_shot_settings({"name": "m"}, folder)
    assert settings is not None
    assert [spec.describe() for spec in signature_of(settings).inputs] == ["x FP32 [batch, 4]"]
    (folder / "1" / "model.onnx").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"model\.onnx cannot be loaded"):
        signature_of(settings)
    monkeypatch.setattr(one_shot, "python_executable", lambda: "/bin/false")
    with pytest.raises(ConfigError, match="ended with 1"):
        signature_of(settings)


def asked(*arrays: np.ndarray, **fields: Any) -> InferenceRequest:
    return InferenceRequest([Tensor(f"t{index}", array) for index, array in enumerate(arrays)], **fields)


def test_tensors_and_parameters_are_read(shared_folder: Path) -> None:
    array = np.arange(1 << 16, dtype=np.float32)
    request = asked(array, np.array([b"a"], np.object_), parameters='{"priority": 1}', request_id="r", timeout_us=5)
    found = read_tensors(request, FrontendSettings(), 1, 7)
    assert (found.request_id, found.task, found.timeout_us, found.arrival_ns) == ("r", "infer", 5, 7)
    assert found.parameters[0].values == {"priority": 1}
    array[:] = 0  # Triton may use its memory again
    assert found.inputs.arrays["t0"][-1] == (1 << 16) - 1 and found.inputs.arrays["t1"].tolist() == [b"a"]


def test_too_many_bytes_are_refused_before_they_are_copied(shared_folder: Path) -> None:
    with pytest.raises(PromptTooLarge, match="max_input_mb"):
        read_tensors(asked(np.zeros(1 << 19, np.uint8), np.zeros((1 << 19) + 1, np.uint8)), FrontendSettings(), 1, 0)
    with pytest.raises(PromptTooLarge, match="max_input_mb"):
        read_tensors(asked(np.array([b"a" * ((1 << 20) + 1)], np.object_)), FrontendSettings(), 1, 0)
    assert not list(shared_folder.iterdir())


def test_the_outputs_of_a_request_are_its_last_response() -> None:
    sink = TritonSink((request := asked()).sender)
    sink.send([OutputChunk(text="", tensors={"y": np.ones(2)}, finish_reason="length")])
    ((response, flags),) = request.sender.sent
    assert [tensor.name() for tensor in response.output_tensors()] == ["y"] and flags
