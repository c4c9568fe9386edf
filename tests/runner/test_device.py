"""Device and dtype are resolved once, by rules that can be read off the settings and the processor."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.runner import device
from tidewheel.runner.device import (
    check_quantization,
    cpu_has_bf16,
    resolve_cache_dtype,
    resolve_device,
    resolve_dtype,
)
from tidewheel.runner.loading import gpu_budget
from tidewheel.runner.warm_up import StepSize, measured_activation_bytes
from tidewheel.settings import MIB
from tidewheel_kernels import FP8
from tidewheel_kernels.native import library

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


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
def test_native_bfloat16_is_read_from_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: bool
) -> None:
    monkeypatch.setattr(library, "CPU_INFO", tmp_path / "cpuinfo")
    assert cpu_has_bf16() is False  # an unknown processor
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert cpu_has_bf16() is expected


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


def no_cuda(monkeypatch: pytest.MonkeyPatch, version: str | None, message: str = "") -> None:
    def init() -> None:
        if message:
            raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", version)


TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU\nand installed a driver"


@pytest.mark.parametrize(
    ("version", "torch_says", "expected"),
    [
        (None, "", "is a build without CUDA: install one with it"),
        (
            "13.0",
            TOO_OLD,
            "(CUDA 13.0) cannot use a GPU: The NVIDIA driver on your system is too old (found version 11040);",
        ),
        ("13.0", NO_DRIVER, "(CUDA 13.0) cannot use a GPU: Found no NVIDIA driver on your system;"),
        ("13.0", "No CUDA GPUs are available", "cannot use a GPU: No CUDA GPUs are available;"),
        ("13.0", "", "(CUDA 13.0) sees no GPU: look at CUDA_VISIBLE_DEVICES and nvidia-smi;"),
    ],
)
def test_cuda_that_cannot_be_used_is_refused_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, version: str | None, torch_says: str, expected: str
) -> None:
    no_cuda(monkeypatch, version, torch_says)
    with pytest.raises(ConfigError) as caught:
        resolve_device(EngineConfig(model="m", device="cuda"))
    message = str(caught.value)
    assert message.startswith("device is 'cuda', but torch ")
    assert expected in message
    assert message.endswith("set device to 'cpu' or 'auto'")
    assert "\n" not in message
    assert resolve_device(EngineConfig(model="m")) == CPU


def gpu(
    monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int] = (9, 0), free: int = 0, total: int = 0
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))


@pytest.mark.parametrize("wanted", ["cuda", "auto"])
def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    gpu(monkeypatch, capability=(7, 5))
    with pytest.raises(ConfigError) as caught:
        resolve_device(EngineConfig(model="m", device=wanted))
    assert str(caught.value) == (
        "NVIDIA X1 has compute capability 7.5: bfloat16 and the kernels need at least 8.0 (Ampere); "
        "use a newer GPU, or set device to 'cpu'"
    )
    assert resolve_device(EngineConfig(model="m", device="cpu")) == CPU


def test_a_gpu_that_cannot_multiply_8_bit_floats_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_quantization("fp8", torch.float32, CPU)
    gpu(monkeypatch, capability=(8, 6))
    check_quantization("none", torch.float16, CUDA)
    with pytest.raises(ConfigError, match=r"quantization is fp8: NVIDIA X1 has compute .* 8.9; set it to none"):
        check_quantization("fp8", torch.bfloat16, CUDA)
    gpu(monkeypatch, capability=(9, 0))
    check_quantization("fp8", torch.bfloat16, CUDA)
    with pytest.raises(ConfigError, match="quantization is fp8, and dtype is float16: set dtype to bfloat16"):
        check_quantization("fp8", torch.float16, CUDA)


def test_a_gpu_without_8_bit_floats_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, capability=(8, 6))
    with pytest.raises(ConfigError) as caught:
        resolve_cache_dtype("fp8_e4m3", torch.bfloat16, CUDA)
    assert str(caught.value) == (
        "kv_cache_dtype is fp8_e4m3: NVIDIA X1 has compute capability 8.6, and 8-bit floats need at least 8.9; "
        "set it to auto"
    )
    assert resolve_cache_dtype("auto", torch.bfloat16, CUDA) == torch.bfloat16
    assert resolve_cache_dtype("fp8_e4m3", torch.bfloat16, CPU) == FP8
    assert resolve_cache_dtype("int8", torch.bfloat16, CPU) == torch.int8
    with pytest.raises(ConfigError, match=r"int8, and NVIDIA X1 runs .* set it to fp8_e4m3 or auto"):
        resolve_cache_dtype("int8", torch.bfloat16, CUDA)
    gpu(monkeypatch, capability=(8, 9))
    assert resolve_cache_dtype("fp8_e4m3", torch.bfloat16, CUDA) == FP8


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_gpu_that_is_new_enough_is_used(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    gpu(monkeypatch, capability=capability)
    assert resolve_device(EngineConfig(model="m")) == CUDA


@pytest.mark.parametrize(
    ("checkpoint", "expected"), [("float16", torch.float16), ("float32", torch.bfloat16), (None, torch.bfloat16)]
)
def test_dtype_on_a_gpu(monkeypatch: pytest.MonkeyPatch, checkpoint: str | None, expected: torch.dtype) -> None:
    gpu(monkeypatch)
    assert resolve_dtype("auto", checkpoint, CUDA) == expected


def test_memory_of_a_gpu_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600 * MIB, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 250 * MIB)
    budget = gpu_budget(EngineConfig(model="m", gpu_memory_utilization=0.8), {"steps and graphs": 150 * MIB}, CPU)
    assert budget.bytes == (800 - 400 - 150) * MIB
    assert budget.setting == "gpu_memory_utilization"
    assert budget.source == (
        "gpu_memory_utilization 0.8 of 1000 MiB (400 are taken, 150 of them by CUDA itself and other programs, "
        "and steps and graphs need 150)"
    )
    limited = gpu_budget(EngineConfig(model="m", device_memory_share=0.5), {"steps and graphs": 150 * MIB}, CPU)
    assert (limited.bytes, limited.setting, limited.host_bytes) == (100 * MIB, "device_memory_share", None)
    assert limited.least_setting(200 * MIB) == 0.6


class Steps:
    """Fit a GPU up to a number of tokens and of rows."""

    def __init__(self, most_tokens: int, most_rows: int) -> None:
        self.most_tokens, self.most_rows = most_tokens, most_rows

    def __call__(self, size: StepSize) -> str:
        if size.num_rows * size.tokens_per_row > self.most_tokens or size.num_rows > self.most_rows:
            raise torch.OutOfMemoryError
        return "done"


def measure(monkeypatch: pytest.MonkeyPatch, steps: Steps, num_ranks: int = 1) -> tuple[str, int]:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 700 * MIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return measured_activation_bytes(steps, StepSize(64, 32), CUDA, num_ranks)


def test_what_a_step_needs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(monkeypatch, Steps(2048, 64)) == ("done", 400 * MIB)


@pytest.mark.parametrize(
    ("steps", "advice"),
    [
        (Steps(2047, 64), ": set max_num_batched_tokens to at most 1024"),
        (Steps(64, 64), ": set max_num_batched_tokens to at most 64"),
        (Steps(2048, 40), ": set max_num_seqs and max_num_batched_tokens to at most 32"),
        (Steps(0, 0), ", nor does a step of one token: use a larger GPU, or stop what else runs on it"),
    ],
)
def test_a_step_that_does_not_fit_names_one_that_does(
    monkeypatch: pytest.MonkeyPatch, steps: Steps, advice: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        measure(monkeypatch, steps)
    assert str(caught.value) == (
        f"a step of 64 requests with 32 tokens each does not fit on the GPU beside 300 MiB of weights{advice}"
    )


def test_a_rank_tries_no_smaller_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for it inside the step that does not fit."""
    steps = mock.Mock(side_effect=Steps(2047, 64))
    with pytest.raises(ConfigError, match=r"300 MiB of weights: lower max_num_batched_tokens or max_num_seqs$"):
        measure(monkeypatch, steps, num_ranks=2)
    assert steps.call_count == 1


def test_num_threads_is_set() -> None:
    before = torch.get_num_threads()
    try:
        resolve_device(EngineConfig(model="m", device="cpu", num_threads=1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
