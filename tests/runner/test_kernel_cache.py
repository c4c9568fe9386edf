"""What triton-lang lacks is said in one line at start; compiled kernels are kept where they can be written."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tidewheel.errors import ConfigError
from tidewheel.runner import device
from tidewheel.runner.device import CompileLog, cache_folder, prepare_kernels

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton import knobs

    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(knobs.compilation, "listener", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X1")


def unwritable(tmp_path: Path) -> Path:
    """A file where a folder should be: nobody can write into it, not even root."""
    path = tmp_path / "file"
    path.touch()
    return path


def test_a_folder_that_was_set_is_used(tmp_path: Path) -> None:
    assert cache_folder({"TRITON_CACHE_DIR": str(tmp_path / "a"), "TRITON_HOME": str(tmp_path)}) == tmp_path / "a"
    assert cache_folder({"TRITON_HOME": str(tmp_path)}) == tmp_path / ".triton" / "cache"


def test_a_folder_that_was_set_and_cannot_be_written_is_refused(tmp_path: Path) -> None:
    folder = unwritable(tmp_path) / "cache"
    with pytest.raises(ConfigError) as caught:
        cache_folder({"TRITON_CACHE_DIR": str(folder)})
    assert str(caught.value) == (
        f"compiled kernels cannot be kept in {folder}: set TRITON_CACHE_DIR to another folder"
    )


def test_without_one_it_lies_in_the_cache_of_the_user(tmp_path: Path) -> None:
    assert cache_folder({"HOME": str(tmp_path)}) == tmp_path / ".cache" / "tidewheel" / "kernels"
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "tidewheel" / "kernels"


def test_a_user_without_a_home_has_the_run_directory(tmp_path: Path) -> None:
    folder = cache_folder({"HOME": str(unwritable(tmp_path))})
    assert folder == tmp_path / "run" / "kernels"
    assert folder.parent.stat().st_mode & 0o077 == 0


def refusal(monkeypatch: pytest.MonkeyPatch, error: Exception) -> str:
    def fail(device: torch.device) -> None:
        raise error

    monkeypatch.setattr(device, "_run_a_kernel", fail)
    with pytest.raises(ConfigError) as caught:
        prepare_kernels(CUDA)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_c_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The very error of triton-lang, from its own search."""
    from triton.runtime import build

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    if hasattr(build, "_find_compiler"):
        monkeypatch.setattr(build, "_find_compiler", build._find_compiler.__wrapped__)  # without what it remembers
    with pytest.raises(RuntimeError) as caught:
        build._build("stub", "stub.c", ".", [], [], [], [])
    expected = "triton-lang needs a C compiler, and there is none: install gcc, or set CC"
    assert refusal(monkeypatch, caught.value) == expected
    assert refusal(monkeypatch, FileNotFoundError(2, "No such file", "/usr/bin/absent-cc")) == expected


def test_a_c_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]))
    assert message.startswith("triton-lang needs a C compiler and Python's headers, but /usr/bin/gcc failed")


def test_whatever_else_goes_wrong_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, RuntimeError("ptxas fatal:\n  Value 'sm_150' is not defined"))
    assert message == (
        "kernels cannot be compiled for NVIDIA X1, or run on it: ptxas fatal: Value 'sm_150' is not defined"
    )


@pytest.mark.parametrize(
    "words",
    ["CUDA error: out of memory", "CUDA error: CUDA-capable device(s) is/are busy or unavailable"],
)
def test_a_gpu_that_another_program_holds_is_named(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    message = refusal(monkeypatch, RuntimeError(f"{words}\nSearch for `cudaErrorX' in the documentation."))
    assert message.startswith(
        "NVIDIA X1 is held by another program, which nvidia-smi names: stop it, or use another GPU (CUDA error: "
    )


def test_triton_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="a GPU needs triton-lang, which is not installed: install 'triton'"):
        prepare_kernels(CUDA)


def test_a_cpu_needs_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert prepare_kernels(torch.device("cpu")) is None
    monkeypatch.setenv("TIDEWHEEL_KERNELS", "reference")
    assert prepare_kernels(CUDA) is None


def test_a_kernel_that_is_compiled_while_serving_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "_run_a_kernel", lambda device: None)
    monkeypatch.setattr("triton.knobs.runtime.jit_cache_hook", None)  # and afterwards
    stages: list[str] = []
    log = prepare_kernels(CUDA)
    assert log is not None
    compile_one(log, "early", cache_hit=False)
    with caplog.at_level(logging.INFO):
        log.begin_serving(lambda stage, _: stages.append(stage))
        assert "kernels: 1 compiled, 0 loaded from the cache" in caplog.text
        assert not stages
        compile_one(log, "late", cache_hit=False)
    assert stages == ["compile", ""]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["kernel late was compiled while requests waited: 1.50 s"]


def compile_one(log: CompileLog, name: str, *, cache_hit: bool) -> None:
    """With the arguments that triton-lang gives a listener."""
    from triton import knobs

    times = knobs.CompileTimes(ir_initialization=0, lowering_stages=[("cubin", 1_500_000)], store_results=0)
    assert knobs.compilation.listener is log
    if (hook := knobs.runtime.jit_cache_hook) is not None:  # true would keep it from compiling
        assert not hook(key="", repr="", fn=None, compile={}, is_manual_warmup=False, already_compiled=False)
    knobs.compilation.listener(
        src=SimpleNamespace(name=name), metadata={}, metadata_group={}, times=times, cache_hit=cache_hit
    )
