"""Device and dtype are resolved once, by rules that can be read off the settings and the processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.runner import device
from tidewheel.runner.device import cpu_has_bf16, resolve_device, resolve_dtype
from tidewheel.runner.profiling import gpu_budget

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx2 fma", False),
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: bf16_lookalike", False),
        ("", False),
    ],
)
def test_native_bfloat16_is_read_from_the_processor(tmp_path: Path, line: str, expected: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert cpu_has_bf16(tmp_path / "cpuinfo") is expected


def test_an_unknown_processor_has_none(tmp_path: Path) -> None:
    assert cpu_has_bf16(tmp_path / "absent") is False


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "native", "expected"),
    [
        ("auto", "bfloat16", False, torch.float32),
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "float32", True, torch.float32),
        ("auto", "float16", True, torch.float32),
        ("auto", None, True, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16),
        ("float16", None, False, torch.float16),
    ],
)
def test_dtype_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, wanted: str, checkpoint: str | None, native: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: native)
    assert resolve_dtype(wanted, checkpoint, CPU) == expected


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="set device to 'cpu' or 'auto'"):
        resolve_device(EngineConfig(model="m", device="cuda"))
    assert resolve_device(EngineConfig(model="m")) == CPU


def test_memory_of_a_gpu_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    budget = gpu_budget(EngineConfig(model="m", gpu_memory_utilization=0.8), 150, CPU)
    assert budget.bytes == 800 - 400 - 150
    assert budget.setting == "gpu_memory_utilization"


def test_num_threads_is_set() -> None:
    before = torch.get_num_threads()
    try:
        resolve_device(EngineConfig(model="m", device="cpu", num_threads=1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
