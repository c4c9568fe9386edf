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
from tidewheel_kernels import KernelUnavailable, choice
from tidewheel_kernels.choice import Op, choose, preference_for, preferences, runs_triton
from tidewheel_kernels.switches import is_on, tried

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
        with pytest.raises(KernelUnavailable, match="'fast' is not known; use one of: auto, torch, reference"):
            preferences()
        monkeypatch.setenv("TIDEWHEEL_KERNELS", "rms_nrom=reference")
        with pytest.raises(KernelUnavailable, match=r"no operation is 'rms_nrom'; there are: .*rms_norm"):
            preferences()

    def test_an_operation_may_have_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TIDEWHEEL_KERNELS", "rms_norm=reference,torch,paged_attention=flash")
        found = [preference_for(name) for name in ("rms_norm", "paged_attention", "silu_and_mul")]
        assert found == ["reference", "flash", "torch"]
        monkeypatch.setenv("TIDEWHEEL_KERNELS", "rms_norm=reference")
        assert [preference_for("rms_norm"), preference_for("silu_and_mul")] == ["reference", "auto"]
        assert not runs_triton("cuda")
        monkeypatch.setenv("TIDEWHEEL_KERNELS", "rms_norm=triton")
        assert runs_triton("cuda")

    def test_flash_is_for_prompts_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        norm = Op("norm", "nowhere", reference=int)
        prompts = Op("prompts", "nowhere", reference=int, has_flash=True)
        token = tried.set(frozenset(["flash_prompts"]))
        assert [op._kind("cuda", TENSOR.dtype) for op in (norm, prompts)] == ["triton", "flash"]
        assert [op._kind("cpu", TENSOR.dtype) for op in (norm, prompts)] == ["reference", "reference"]
        tried.reset(token)
        assert prompts._kind("cuda", TENSOR.dtype) == "triton"
        monkeypatch.setenv("TIDEWHEEL_KERNELS", "prompts=flash")
        assert [op._kind("cuda", TENSOR.dtype) for op in (norm, prompts)] == ["triton", "flash"]
        monkeypatch.setenv("TIDEWHEEL_KERNELS", "flash")
        with pytest.raises(KernelUnavailable, match="norm has no implementation flash"):
            norm._kind("cuda", TENSOR.dtype)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(KernelUnavailable, match="TIDEWHEEL_KERNELS=flash needs CUDA tensors"):
            choose("cpu", "flash", has_cpu=True)


def test_an_operation_chooses_once_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    op = Op("double", "nowhere", reference=lambda x: 2 * x)
    with caplog.at_level(logging.INFO, logger="tidewheel_kernels"):
        assert op.chosen[TENSOR.device, TENSOR.dtype](3) == 6
        monkeypatch.setenv("TIDEWHEEL_KERNELS", "fast")
        assert op.chosen[TENSOR.device, TENSOR.dtype](4) == 8
    assert [record.getMessage() for record in caplog.records] == ["double on cpu in torch.float32: reference"]


def test_a_forced_reference_wins_over_the_cpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_KERNELS", "reference")
    assert (
        Op("name", "nowhere", reference=lambda: "reference", cpu=lambda: "cpu").chosen[TENSOR.device, TENSOR.dtype]()
        == "reference"
    )


def test_switches_are_off_unless_they_are_named() -> None:
    program = "from tidewheel_kernels.switches import is_on; print(is_on('flash_prompts'), is_on('dependent_launch'))"
    assert run(program, TIDEWHEEL_TRY="dependent_launch").stdout == "False True\n"
    program = (
        "import torch; from tidewheel_kernels.attention import _OP; _OP.choose(torch.device('cpu'), torch.float32)"
    )
    refused = run(program, TIDEWHEEL_TRY="dependent_launch,pdl")
    assert "'dependent_launch,pdl' has pdl, which is not known; use some of: dependent_launch, " in refused.stderr
    assert not is_on("fast_accumulation")


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(tidewheel_kernels.__file__).parents[1]), **variables}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )


def test_the_package_works_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, tidewheel_kernels as ops\n"
        "x = torch.ones(1, 2)\n"
        "print(ops.silu_and_mul(x).shape, ops.rms_norm(x, x[0], 0.0).tolist())\n"
    )
    assert run(program, TIDEWHEEL_KERNELS="").stdout == "torch.Size([1, 1]) [[1.0, 1.0]]\n"
