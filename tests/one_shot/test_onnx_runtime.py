"""The adapter of ONNX Runtime against the library alone, on files made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.one_shot.onnx_files import FLOAT, INT64, STRING, looked_up, model, node, scaled, weights
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.adapters import load_adapter, with_kind

onnxruntime = pytest.importorskip("onnxruntime")


def load(path: Path, content: bytes, **settings: Any) -> Any:
    (path / "model.onnx").write_bytes(content)
    return load_adapter(EngineConfig.from_settings(with_kind({"num_threads": 1, **settings}, path), base_dir=path))


def test_outputs_are_those_of_the_library(tmp_path: Path) -> None:
    adapter, signature = load(tmp_path, scaled())
    assert [spec.describe() for spec in signature.inputs] == ["x FP32 [batch, 4]"]
    assert [spec.describe() for spec in signature.outputs] == ["y FP32 [batch, 2]"]
    assert signature.is_batched and "1 thread" in adapter.device
    x = np.random.default_rng(0).random((5, 4), np.float32)
    (wanted,) = onnxruntime.InferenceSession(scaled()).run(None, {"x": x})
    assert (adapter.run({"x": x})["y"] == wanted).all()


def test_texts_and_scalars_are_converted(tmp_path: Path) -> None:
    nodes = [node("Identity", ["text"], ["same"]), node("Identity", ["number"], ["one"])]
    inputs = [("text", STRING, ("batch",)), ("number", INT64, ())]
    adapter, signature = load(tmp_path, model(nodes, inputs, [("same", STRING, ("batch",)), ("one", INT64, ())]))
    assert [spec.dims for spec in signature.inputs] == [("batch",), (1,)]
    outputs = adapter.run({"text": np.array([b"a", "ä".encode()], np.object_), "number": np.array([3])})
    assert outputs["same"].tolist() == ["a", "ä"] and outputs["one"].tolist() == [3]


def test_an_operator_that_raises(tmp_path: Path) -> None:
    adapter, _ = load(tmp_path, looked_up())
    assert adapter.run({"rows": np.array([[0, 3]])})["values"].tolist() == [[10.0, 13.0]]
    with pytest.raises(Exception, match=r"out of (data )?bounds"):
        adapter.run({"rows": np.array([[0, 9]])})


@pytest.mark.parametrize("content", [b"", b"not a model", scaled()[:-40]])
def test_a_broken_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, content)
    assert "model.onnx" in str(error.value) and "\n" not in str(error.value)


def test_external_data_lies_in_the_folder(tmp_path: Path) -> None:
    def content(location: str) -> bytes:
        external = {"location": location, "offset": "0", "length": "8"}
        values = weights("w", np.ones(2, np.float32), external)
        return model([node("Add", ["x", "w"], ["y"])], [("x", FLOAT, (2,))], [("y", FLOAT, (2,))], values)

    folder = tmp_path / "1"
    folder.mkdir()
    for place in (folder, tmp_path):
        (place / "data.bin").write_bytes(np.float32([1, 2]).tobytes())
    adapter, _ = load(folder, content("data.bin"))
    assert adapter.run({"x": np.zeros(2, np.float32)})["y"].tolist() == [1.0, 2.0]
    for outside in ("../data.bin", str(tmp_path / "data.bin")):
        with pytest.raises(ConfigError):
            load(folder, content(outside))


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="there is CUDA")
def test_a_missing_provider_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CUDAExecutionProvider"):
        load(tmp_path, scaled(), device="cuda")
