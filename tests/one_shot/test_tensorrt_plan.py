"""TensorRT plans against a double of the runtime: no plan of the real one was run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.one_shot import tensorrt_double
from support.one_shot.loading import load, refusal
from support.one_shot.tensorrt_double import MOST, PLAN


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt_double)
    monkeypatch.delitem(sys.modules, "tidewheel.one_shot.tensorrt_plan", raising=False)
    tensorrt_plan = importlib.import_module("tidewheel.one_shot.tensorrt_plan")
    stream = SimpleNamespace(cuda_stream=1, synchronize=lambda: None)
    monkeypatch.setattr(tensorrt_plan, "_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    (tmp_path / "model.plan").write_bytes(PLAN)
    return tmp_path / "model.plan"


def test_a_plan_runs_in_memory_of_torch(path: Path) -> None:
    adapter, signature = load(path)
    assert [spec.describe() for spec in (*signature.inputs, *signature.outputs)] == [
        "x FP32 [x.0, 4]",
        "y FP32 [y.0, 2]",
    ]
    assert signature.is_batched
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert adapter.run({"x": x})["y"].tolist() == [[1, 5], [9, 13], [17, 21]]


def test_a_run_that_fails_says_why(path: Path) -> None:
    adapter, _ = load(path)
    with pytest.raises(ValueError, match=r"x \[9, 4\] is outside the plan's profile"):
        adapter.run({"x": np.ones((MOST + 1, 4), np.float32)})
    with pytest.raises(RuntimeError):
        adapter.run({"x": np.full((1, 4), -1, np.float32)})


def test_a_plan_that_does_not_fit_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(PLAN + b"BF16")
    assert "bf16" in refusal(path)
    path.write_bytes(b"other")
    assert "does not fit TensorRT 10.9.0 and the memory of GPU" in refusal(path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in refusal(path)


def test_a_missing_package_names_its_extra(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.delitem(sys.modules, "tidewheel.one_shot.tensorrt_plan", raising=False)
    assert "pip install 'tidewheel[tensorrt]'" in refusal(path)
