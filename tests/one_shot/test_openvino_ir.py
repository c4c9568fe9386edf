"""OpenVINO IR against the library alone, on models built by its own operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.one_shot.loading import load, refusal

openvino = pytest.importorskip("openvino")
from support.one_shot.openvino_file import save  # noqa: E402


def test_outputs_are_those_of_the_library(tmp_path: Path) -> None:
    path = save(tmp_path)
    adapter, signature = load(path)
    assert signature.inputs[0].describe() == "x FP32 [x.0, 4]" and signature.inputs[1].dims == (1,)
    x = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    x, n = (
        np.frombuffer(x.tobytes(), x.dtype).reshape(3, 4),
        np.frombuffer(bytes([3, *bytes(7)]), np.int64).reshape(()),
    )
    assert not x.flags.writeable, "as in a message"
    found = adapter.run({"x": x, signature.inputs[1].name: n})
    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    wanted = compiled([x, np.array(3)])
    assert (found["y"] == wanted[0]).all() and found["y"].shape == (3, 2)
    assert [array.tolist() for array in found.values()][1] == 4
    assert (adapter.run({"x": x[:1], signature.inputs[1].name: n})["y"] == wanted[0][:1]).all()
    assert found["y"].shape == (3, 2), "results are copies"


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    path = save(tmp_path)
    path.with_suffix(".bin").unlink()
    assert "model.xml" in refusal(path) and "bin file" in refusal(path)
    for content in (b"", b"not a model", b"<net/>"):
        path.write_bytes(content)
        assert "model.xml cannot be loaded by openvino" in refusal(path)


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert "device" in refusal(path, device="cuda")
    assert "openvino has none" in refusal(path, {"inputs": {}})
