"""Runs the kernels on a GPU if there is one, else through triton-lang's interpreter on the CPU.

triton-lang decides at import whether functions are interpreted. So the kernels are imported here, under
TRITON_INTERPRET=1, and the variable is put back for whatever else runs in this process. If something imported
triton-lang before, the kernel tests skip; ``make test-kernels`` gives them a process of their own.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import tidewheel_kernels
from support.kernels.covering import covering
from support.kernels.interpreted_runs import ON_GPU

FOLDER = Path(__file__).parent


def _import_interpreted() -> str:
    """Imports every kernel for the interpreter; returns why it could not, or an empty text."""
    if "triton" in sys.modules:
        from triton import knobs

        return "" if knobs.runtime.interpret else "triton was imported without TRITON_INTERPRET=1"
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        for module in pkgutil.walk_packages(tidewheel_kernels.__path__, "tidewheel_kernels."):
            if module.name.rpartition(".")[2].startswith("triton_"):
                importlib.import_module(module.name)
    from triton import knobs

    knobs.runtime.interpret = True  # asked again at every launch, when the variable has its old value
    _mend_conversions()
    return ""


def _mend_conversions() -> None:
    """Let torch convert from and to float8_e4m3fn: the interpreter rounds small numbers to 0, and NaN to numbers."""
    from triton.language import float8e4nv, float32
    from triton.runtime import interpreter

    convert = interpreter._convert_float  # returns bits

    def mended(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == float8e4nv:
            wide = torch.from_numpy(np.ascontiguousarray(values)).view(torch.float8_e4m3fn).float().numpy()
            return wide if target == float32 else convert(wide, float32, target, rounding)
        if target == float8e4nv:
            assert source == float32
            narrow = torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn)
            return narrow.view(torch.uint8).numpy()
        return convert(values, source, target, rounding)

    interpreter._convert_float = mended


def _floats(operand: Any) -> Any:
    """Return an operand of `tl.dot` in float32: the interpreter has bfloat16 as bits."""
    from triton.language import bfloat16

    if operand.dtype.scalar == bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    return operand.data.astype(np.float32)


def _rounded_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    """Add product after product: a BLAS may choose the order by an element's place in the tile."""
    from triton.runtime.interpreter import TensorHandle

    left, right, total = _floats(a), _floats(b), d.data
    for k in range(left.shape[1]):
        total = total + left[:, k, None] * right[None, k, :]
    return TensorHandle(total, d.dtype.scalar)


@pytest.fixture
def exact_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each element of a `tl.dot` depend on its row and column alone, as on a GPU."""
    if device == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_dot", _rounded_dot)


OBSTACLE = "" if ON_GPU else _import_interpreted()


@pytest.fixture
def device() -> str:
    """Where tensors for the kernels live."""
    if OBSTACLE:
        pytest.skip(OBSTACLE)
    return "cuda" if ON_GPU else "cpu"


def pytest_unconfigure() -> None:
    """Drop what triton-lang's bindings print when the process ends: pages of leaked types, after the result."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if FOLDER in item.path.parents]
    for item in here:
        # numpy, which interprets the kernels, warns where a GPU gives inf or NaN without a word.
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
    if not ON_GPU:
        _leave_to_long_runs(here)


def _leave_to_long_runs(items: list[pytest.Item]) -> None:
    """Mark as slow what a covering array of the pairs of a test's parameters does not need."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        needed = set(covering([item.callspec.indices for item in same]))
        for index, item in enumerate(same):
            if index not in needed:
                item.add_marker(pytest.mark.slow)
