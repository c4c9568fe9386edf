"""C kernels compiled as for other processors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidewheel_kernels.native import library
from tidewheel_kernels.native.library import NativeKernel

LIMIT_S = 280  # of a compiler beside other tests, below the limit of a test
# Compiler's flags by name of a processor, with the CPU flag that it needs.
PROCESSORS = {
    "plain": ("-march=x86-64", "sse2"),
    "avx2": ("-march=x86-64-v3", "avx2"),
    # As compilers tune for some processors: the code around decides whether a product and a sum are one instruction.
    "avx2-chains": ("-march=x86-64-v3 --param=avoid-fma-max-bits=512", "avx2"),
    "avx512-chains": ("-march=x86-64-v4 --param=avoid-fma-max-bits=512", "avx512bw"),
    "avx512": ("-march=x86-64-v4", "avx512bw"),
    "avx512-pairs": ("-march=x86-64-v4 -mavx512bf16", "avx512_bf16"),
    "amx": (f"-march=native -DTILES -include {Path(__file__).with_name('emulated_tiles.h')}", "avx512bw"),
}


@contextmanager
def compiled_for(processor: str, folder: Path, kernel: NativeKernel) -> Iterator[None]:
    """Let `kernel` be compiled for a processor, or skip the test."""
    flags, needed = PROCESSORS[processor]
    if needed not in library.processor().split():
        pytest.skip(f"needs a processor with {needed}")
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {library.find_compiler({})} "$@" {flags}\n')
    compiler.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "TIMEOUT_S", LIMIT_S)
        patch.setenv("CC", str(compiler))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        _forget(kernel)
        yield
    _forget(kernel)


def _forget(kernel: NativeKernel) -> None:
    library.native_library.cache_clear()
    kernel.clear()
