"""Bound launches run the kernel that triton-lang would choose, with its arguments; or triton-lang does it itself.

In a process without the interpreter: `make aot` compares under the oldest triton-lang too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from support.kernels.launch_comparison import OPERATIONS, Recorder, compare, recorded
from tidewheel_kernels.launch_config import compile_target
from tidewheel_kernels.norm.triton_kernels import rms_norm, rms_norm_kernel
from tidewheel_kernels.switches import Switch
from tidewheel_kernels.triton_launch import KernelLauncher, binds

pytestmark = pytest.mark.skipif(
    not hasattr(rms_norm_kernel, "params"), reason="the kernels were imported for the interpreter"
)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recorded() as recorder:
        yield recorder


def norm(x: torch.Tensor) -> None:
    rms_norm(x, torch.empty(64, dtype=x.dtype), 1e-6, None, 0.0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_both_ways_pass_the_same(operation: str, seed: int) -> None:
    num_launches, num_bound = compare(operation, seed)
    assert 0 < num_bound < num_launches


def test_a_kernel_is_bound_from_its_second_launch_on(recorder: Recorder) -> None:
    for num_tokens in (3, 1, 16):  # one kernel for any number of tokens
        norm(torch.empty(num_tokens, 64))
    assert [launch[:3] for launch in recorder.launches] == [(3, 1, 1), (1, 1, 1), (16, 1, 1)]
    assert len({launch[4] for launch in recorder.launches}) == 1 and recorder.num_bound == 2


@pytest.mark.parametrize(("switches", "architecture", "is_early"), [
    ((), 90, False), (("dependent_launch",), 90, True), (("dependent_launch",), 80, False),
])  # fmt: skip
def test_a_bound_launch_starts_early_where_that_is_tried(
    switches: tuple[Switch, ...], architecture: int, is_early: bool
) -> None:
    token = compile_target.set(architecture)
    with recorded(*switches) as recorder:
        norm(torch.empty(2, 64))
        norm(torch.empty(2, 64))
    compile_target.reset(token)
    assert [launch[6] for launch in recorder.launches] == [("pdl", is_early)] * 2 and recorder.num_bound == 1


def test_other_dtypes_and_alignments_are_not_bound(recorder: Recorder) -> None:
    norm(torch.empty(2, 64))
    norm(torch.empty(2, 64, dtype=torch.bfloat16))
    norm(torch.empty(2 * 64 + 1)[1:].view(2, 64))
    assert len({launch[4] for launch in recorder.launches}) == 3 and recorder.num_bound == 0


def test_while_a_profiler_listens_triton_lang_launches(recorder: Recorder) -> None:
    hooks = knobs.runtime.launch_enter_hook
    norm(torch.empty(2, 64))
    hooks.add(print)
    try:
        norm(torch.empty(2, 64))
        assert recorder.num_bound == 0
    finally:
        hooks.remove(print)
    norm(torch.empty(2, 64))
    assert recorder.num_bound == 1


def test_only_known_versions_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, expected in {"3.5.1": False, "3.6.0": True, "3.9.1": True, "3.10.0": False}.items():
        monkeypatch.setattr("triton.__version__", version)
        assert binds() is expected


def test_a_number_that_is_specialised_must_be_a_constant(recorder: Recorder) -> None:
    constants = {"hidden": 64, "eps": 1e-6, "weight_offset": 0.0, "HAS_RESIDUAL": False}
    constants |= {"STARTS_EARLY": False, "BLOCK": 64}
    launch = KernelLauncher(rms_norm_kernel, constants)
    with pytest.raises(TypeError, match="specialised on x_stride"):
        launch((1, 1, 1), [torch.empty(64)] * 5, 64, 64)


def test_constants_are_the_last_arguments() -> None:
    with pytest.raises(TypeError, match=r"ends in \['BLOCK'\], not in \['hidden'\]"):
        KernelLauncher(rms_norm_kernel, {"hidden": 64})
