from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import tidewheel_kernels
from tidewheel_kernels import choice
from tidewheel_kernels.choice import KernelUnavailable, Op, choose, preference_from_environment

TENSOR = torch.zeros(1)


class TestChoice:
    RULES: ClassVar = [
        ("cuda", "auto", True, "triton"),
        ("cuda", "reference", True, "reference"),
        ("cpu", "auto", True, "cpu"),
        ("cpu", "auto", False, "reference"),
        ("cpu", "torch", True, "cpu"),
        ("cpu", "torch", False, "reference"),
        ("cuda", "torch", True, "triton"),
        ("cpu", "reference", True, "reference"),
    ]

    @pytest.mark.parametrize(("device", "preference", "has_cpu", "kind"), RULES)
    def test_rule(self, device: str, preference: choice.Preference, has_cpu: bool, kind: str) -> None:
        assert choose(device, preference, has_cpu=has_cpu) == kind

    def test_kernels_on_cpu_tensors_need_the_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert choose("cpu", "triton", has_cpu=True) == "triton"
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(KernelUnavailable, match="needs CUDA tensors"):
            choose("cpu", "triton", has_cpu=True)

    def test_gpu_without_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choice, "triton_installed", lambda: False)
        with pytest.raises(KernelUnavailable, match="install 'triton'"):
            choose("cuda", "auto", has_cpu=True)

    def test_unknown_preference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TIDEWHEEL_KERNELS", "fast")
        with pytest.raises(KernelUnavailable, match="auto, torch, reference, triton"):
            preference_from_environment()


def test_an_operation_chooses_once_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    op = Op("double", "nowhere", reference=lambda x: 2 * x)
    with caplog.at_level(logging.INFO, logger="tidewheel_kernels"):
        assert op.on(TENSOR)(3) == 6
        monkeypatch.setenv("TIDEWHEEL_KERNELS", "fast")
        assert op.on(TENSOR)(4) == 8
    assert [record.getMessage() for record in caplog.records] == ["double on cpu in torch.float32: reference"]


def test_a_forced_reference_wins_over_the_cpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_KERNELS", "reference")
    assert Op("name", "nowhere", reference=lambda: "reference", cpu=lambda: "cpu").on(TENSOR)() == "reference"


def test_the_package_works_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, tidewheel_kernels as ops\n"
        "x = torch.ones(1, 2)\n"
        "print(ops.silu_and_mul(x).shape, ops.rms_norm(x, x[0], 0.0).tolist())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(tidewheel_kernels.__file__).parents[1])}
    environment.pop("TIDEWHEEL_KERNELS", None)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "torch.Size([1, 1]) [[1.0, 1.0]]\n"
