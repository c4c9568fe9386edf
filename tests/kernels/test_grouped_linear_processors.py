"""The C kernel as compiled for other processors; AMX is emulated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.kernels import grouped_weights
from support.kernels.grouped_weights import BITS, MINIMUMS, drawn, drawn_weights
from support.kernels.kernel_harness import RATIO, assert_close, needs_compiler
from tidewheel_kernels import grouped_linear as package
from tidewheel_kernels.grouped_linear import LaneWeights, grouped_linear_native
from tidewheel_kernels.grouped_linear.reference import Bits, grouped_linear_reference, round_inputs
from tidewheel_kernels.native import library

pytestmark = needs_compiler
TILES = f"-march=native -DTILES -include {Path(grouped_weights.__file__).with_name('emulated_tiles.h')}"
NEEDED = {"-march=x86-64": "sse2", "-march=x86-64-v3": "avx2", "-march=x86-64-v4": "avx512bw", TILES: "avx512bw"}


@pytest.fixture(scope="module", params=NEEDED, ids=["plain", "avx2", "avx512", "amx"])
def _processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if NEEDED[request.param] not in library.processor().split():
        pytest.skip(f"needs a processor with {NEEDED[request.param]}")
    folder = tmp_path_factory.mktemp("compiler")
    compiler = folder / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {library.find_compiler({})} "$@" {request.param}\n')
    compiler.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", str(compiler))
        patch.setenv("XDG_CACHE_HOME", str(folder))
        _forget()
        yield
    _forget()


def _forget() -> None:
    library.native_library.cache_clear()
    package._grouped_linear.clear()


@pytest.mark.usefixtures("_processor")
@BITS
@MINIMUMS
@pytest.mark.parametrize("num_rows", [1, 70])
@pytest.mark.parametrize("group_size", [32, 128])
def test_as_the_reference(bits: Bits, has_minimums: bool, num_rows: int, group_size: int) -> None:
    weights = drawn_weights(75, 384, bits, group_size, has_minimums=has_minimums)
    x = drawn(num_rows, 384)
    found = grouped_linear_native(x, LaneWeights(weights), None)
    assert_close("product", grouped_linear_reference(round_inputs(x), weights, None), found, RATIO[torch.float32])
