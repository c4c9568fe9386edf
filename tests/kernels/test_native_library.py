from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.kernels.kernel_harness import needs_compiler
from tidewheel_kernels import activation, silu_and_mul
from tidewheel_kernels.activation import silu_and_mul_native
from tidewheel_kernels.activation.cpu import silu_and_mul_cpu
from tidewheel_kernels.choice import Choices, Op
from tidewheel_kernels.native import library
from tidewheel_kernels.norm import rms_norm_native

pytestmark = needs_compiler
X = torch.linspace(-3, 3, 24).view(3, 8)


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TIDEWHEEL_KERNELS", raising=False)
    monkeypatch.setattr(activation._OP, "chosen", Choices(activation._OP))
    activation._silu_and_mul.clear()
    library.native_library.cache_clear()
    yield
    library.native_library.cache_clear()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, and sources that take a moment to compile."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "zero.h").write_text("int zero(void);\n")
    (sources / "zero.c").write_text('#include "zero.h"\nint zero(void) { return 0; }\n')
    monkeypatch.setattr(library, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tidewheel" / "kernels"


def compiler_that(folder: Path, does: str) -> str:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o700)
    return str(path)


def test_a_library_is_compiled_once_per_dtype_and_kept(home: Path) -> None:
    assert library.native_library(torch.float32) is not None
    (first,) = home.iterdir()
    written = first.stat().st_mtime_ns
    library.native_library.cache_clear()
    assert library.native_library(torch.float32) is not None
    assert list(home.iterdir()) == [first] and first.stat().st_mtime_ns == written
    assert library.native_library(torch.bfloat16) is not None
    assert len(list(home.iterdir())) == 2


@pytest.mark.parametrize("name", ["zero.c", "zero.h"])
def test_other_sources_are_another_library(home: Path, name: str) -> None:
    assert library.native_library(torch.float32) is not None
    library.native_library.cache_clear()
    with (library.SOURCES / name).open("a") as file:
        file.write("/* edited */\n")
    assert library.native_library(torch.float32) is not None
    assert len(list(home.iterdir())) == 2


def test_a_damaged_library_is_compiled_anew(home: Path) -> None:
    home.mkdir(mode=0o700, parents=True)
    kept = library._compiled(torch.float32, library.find_compiler(os.environ), home)
    whole = kept.stat().st_size
    kept.write_bytes(b"\x7fELF")
    assert library.native_library(torch.float32) is not None
    assert list(home.iterdir()) == [kept] and kept.stat().st_size == whole


def test_float16_has_none() -> None:
    assert library.native_library(torch.float16) is None
    assert silu_and_mul(X.half()).dtype == torch.float16


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("echo 'cc: no such option' >&2; exit 1", "cc: no such option"),
        ('[ "$1" = --version ] || { echo "attention.c:7: error: boom" >&2; exit 1; }', "error: boom"),
    ],
    ids=["no version", "no code"],
)
@pytest.mark.usefixtures("home")
def test_without_a_working_compiler_torch_does_the_same(
    does: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler_that(tmp_path, does))
    with caplog.at_level(logging.WARNING, logger="tidewheel_kernels"):
        assert torch.equal(silu_and_mul(X), silu_and_mul_cpu(X))
    (record,) = caplog.records
    assert message in record.getMessage() and "slower" in record.getMessage()


@pytest.mark.usefixtures("home")
def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with caplog.at_level(logging.WARNING, logger="tidewheel_kernels"):
        assert library.native_library(torch.float32) is None
    assert "install gcc, or set CC" in caplog.text


def test_a_folder_that_others_may_write_to_is_not_trusted(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert library.native_library(torch.float32) is not None
    assert list(home.iterdir()) == list(scratch.iterdir()) == []


def test_a_kept_library_that_somebody_else_put_there_is_not_loaded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert library.native_library(torch.float32) is not None
    assert list(home.iterdir()) == []


@pytest.mark.usefixtures("home")
def test_two_openmp_runtimes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 00000000 08:01 1 /a/torch/lib/libgomp.so.1\n"
        "7f02-7f03 r-xp 00000000 08:01 2 /usr/lib/libomp.so.5\n"
        "7f04-7f05 rw-p 00000000 00:00 0\n"
    )
    monkeypatch.setattr(library, "MAPS", maps)
    assert library.native_library(torch.float32) is None
    assert "/usr/lib/libomp.so.5" in caplog.text


@pytest.mark.usefixtures("home")
def test_the_environment_chooses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = activation._OP.chosen[X.device, X.dtype]
    assert chosen is silu_and_mul_native
    monkeypatch.setattr(activation._OP, "chosen", Choices(activation._OP))
    monkeypatch.setenv("TIDEWHEEL_KERNELS", "torch")
    assert activation._OP.chosen[X.device, X.dtype] is silu_and_mul_cpu


def test_weights_of_another_dtype_are_refused() -> None:
    with pytest.raises(TypeError, match=r"float32 was given torch\.bfloat16"):
        rms_norm_native(X, X[0].bfloat16(), 1e-5, None, 0.0)


def test_threads_change_nothing() -> None:
    x = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = silu_and_mul(x)
        torch.set_num_threads(2)
        assert torch.equal(silu_and_mul(x), alone)
    finally:
        torch.set_num_threads(before)


def test_an_operation_without_a_native_kernel_stays_with_torch() -> None:
    op = Op("name", "nowhere", reference=lambda x: "reference", cpu=lambda x: "cpu")
    assert op.chosen[X.device, X.dtype](X) == "cpu"
