"""Compiles the kernels for GPUs that are not there, in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tidewheel_kernels
from tidewheel_kernels import KernelUnavailable
from tidewheel_kernels.aot import ARCHITECTURES, main
from tidewheel_kernels.aot_cases import CASES
from tidewheel_kernels.aot_instructions import count, missing
from tidewheel_kernels.launch_config import RESIDENT_PROGRAMS_PER_SM

DEFAULT = [case.name for case in CASES if case.default]
OTHERS = [case.name for case in CASES if not case.default]
SOURCES = str(Path(tidewheel_kernels.__file__).parents[1])
Compiled = tuple[int, list[dict[str, Any]], str]  # exit status, reports, errors
SPLIT_LAUNCHES = 3  # the plan, the kernel and the merge


def compile_cases(names: list[str]) -> Compiled:
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "ignore", "-m", "tidewheel_kernels.aot", "--json", "--case", *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, [json.loads(line) for line in result.stdout.splitlines()], result.stderr


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return compile_cases(DEFAULT)


def check(names: list[str], compiled: Compiled) -> None:
    status, reports, errors = compiled
    problems = [f"{r['case']} {r['kernel']} sm_{r['arch']}: {r['problem']}" for r in reports if r["problem"]]
    assert not problems and status == 0, "\n".join([*problems, errors])
    least = {case.name: case.least_arch for case in CASES}
    wanted = {(name, arch) for name in names for arch in ARCHITECTURES if arch >= least[name]}
    assert {(r["case"], r["arch"]) for r in reports} == wanted
    assert all(r["registers"] > 0 for r in reports)


def test_kernels_compile_and_do_not_spill(compiled: Compiled) -> None:
    check(DEFAULT, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes_compile(name: str) -> None:
    check([name], compile_cases([name]))


def test_a_split_decode_is_three_kernels(compiled: Compiled) -> None:
    reports = [report for report in compiled[1] if report["case"] == "decode-128-split"]
    assert len(reports) == SPLIT_LAUNCHES * len(ARCHITECTURES)


def test_kernels_that_start_early_read_weights_alone_before_they_wait(compiled: Compiled) -> None:
    early = [report for report in compiled[1] if report["case"].endswith("-early")]
    waits = {(r["kernel"], r["arch"]): (r["instructions"]["waits"], r["instructions"]["early_loads"]) for r in early}
    kernels = {"rms_norm_kernel": 2, "silu_and_mul_kernel": 0, "rope_and_cache_kernel": 0}  # 1,024 weights
    assert waits == {
        (kernel, arch): (0, 0) if arch == 80 else (1, num_loads)
        for kernel, num_loads in kernels.items()
        for arch in ARCHITECTURES
    }


def test_instructions_are_told_apart() -> None:
    ptx = """
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        ld.global.L1::evict_first.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        ld.global.b32 { %r5 }, [ %rd2 + 0 ];
        cp.async.cg.shared.global [ %r6 + 0 ], [ %rd3 + 0 ], 0x10, %r7;
        cp.async.ca.shared.global [ %r6 + 0 ], [ %rd3 + 0 ], 0x4, %r7;
        cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%rd4, {%r1}], [%r9];
        griddepcontrol.wait;
        wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd5, %rd6, 1, 1, 1, 0, 0;
        st.global.b16 [ %rd7 + 0 ], { %rs1 };
    """
    found = count(ptx)
    assert (found.wide_loads, found.narrow_loads, found.tma_loads, found.wgmma) == (3, 2, 1, 1)
    assert (found.mma, found.wide_stores, found.narrow_stores) == (0, 0, 1)
    assert (found.waits, found.early_loads) == (1, 3)
    assert missing(found, ("tma_loads", "wide_stores", "tcgen05")) == ["wide_stores", "tcgen05"]


def test_every_kernel_is_compiled_by_default(compiled: Compiled) -> None:
    _, reports, _ = compiled
    decodes = [r for r in reports if r["kernel"] == "decode_attention_kernel" and r["arch"] != 80]
    assert all(report["resident"] >= RESIDENT_PROGRAMS_PER_SM for report in decodes), decodes
    prompts = {
        r["arch"]: r["instructions"]["tma_loads"] for r in reports if r["kernel"] == "prefill_attention_kernel"
    }
    assert prompts[90] and prompts[100] and not prompts[80]
    folder = Path(tidewheel_kernels.__file__).parent
    defined = {
        line.removeprefix("def ").split("(")[0]
        for file in folder.rglob("triton_*.py")
        for line in file.read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    assert {report["kernel"] for report in reports} == defined


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KernelUnavailable, match="TRITON_INTERPRET unset"):
        main(["--case", "kv_cache"])
