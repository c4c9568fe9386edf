"""Compile every kernel for absent GPUs, and report registers, stack, shared memory and instructions.

    python -m tidewheel_kernels.aot [--arch 80 90 100] [--case NAME ...] [--all] [--json | --listing]

Exit status 1 if a kernel does not compile, needs too much shared memory or a forbidden stack, or lacks instructions
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch

from tidewheel_kernels.aot_cases import CASES, CompileCase
from tidewheel_kernels.aot_instructions import NONE, InstructionCounts, count, expected, missing
from tidewheel_kernels.choice import interpreter_enabled, triton_installed
from tidewheel_kernels.launch_config import compile_target
from tidewheel_kernels.switches import KernelUnavailable, tried

ARCHITECTURES = (80, 90, 100)
# CUDA programming guide, "Technical specifications per compute capability", bytes per block.
MAX_SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
SHARED_PER_SM = {80: 164 * 1024, 86: 100 * 1024, 89: 100 * 1024, 90: 228 * 1024, 100: 228 * 1024, 120: 100 * 1024}
WARPS_PER_SM = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
PROGRAMS_PER_SM = {80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 120: 24}
REGISTERS_PER_SM = 65_536
SHARED_RESERVED = 1024

_POINTER_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True)
class RecordedLaunch:
    kernel: Any  # triton.JITFunction
    arguments: dict[str, Any]


@dataclass(frozen=True)
class CompileReport:
    case: str
    kernel: str
    arch: int
    num_warps: int
    num_stages: int
    registers: int
    stack: int  # bytes
    shared: int
    problem: str  # empty: none
    instructions: InstructionCounts = NONE

    @property
    def resident(self) -> int:
        """Programs that fit a multiprocessor; warps get registers by 256."""
        warp_registers = 256 * -(-32 * self.registers // 256)
        shared = 128 * -(-(self.shared + SHARED_RESERVED) // 128)
        by_registers = REGISTERS_PER_SM // max(warp_registers * self.num_warps, 1)
        by_warps = WARPS_PER_SM[self.arch] // self.num_warps
        return min(by_registers, SHARED_PER_SM[self.arch] // shared, by_warps, PROGRAMS_PER_SM[self.arch])


def compile_case(case: CompileCase, arch: int) -> list[CompileReport]:
    target, switches = compile_target.set(arch), tried.set(case.switches)
    try:
        with _recorded_launches() as launches:
            case.call()
    finally:
        compile_target.reset(target)
        tried.reset(switches)
    if not launches:
        raise AssertionError(f"case {case.name} launched no kernel")
    return [_compile(case, launch, arch) for launch in launches]


@contextmanager
def _recorded_launches() -> Iterator[list[RecordedLaunch]]:
    from triton.runtime.jit import KernelInterface

    launches: list[RecordedLaunch] = []

    def record(kernel: Any, grid: tuple[int, ...]) -> Any:  # noqa: ARG001
        return lambda **arguments: launches.append(RecordedLaunch(kernel, arguments))

    with mock.patch.object(KernelInterface, "__getitem__", record):
        yield launches


def _compile(case: CompileCase, launch: RecordedLaunch, arch: int) -> CompileReport:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = dict(launch.arguments)
    wanted = expected(launch.kernel.fn.__name__, arguments, arch)
    options = {"num_warps": arguments.pop("num_warps", 4), "num_stages": arguments.pop("num_stages", 3)}
    others = {name: arguments.pop(name) for name in ("maxnreg", "launch_pdl") if name in arguments}
    signature, constants, attributes = _specialise(launch.kernel, arguments)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    name = launch.kernel.fn.__name__
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options | others)
    except Exception as error:  # the compiler raises many types
        return CompileReport(
            case.name, name, arch, **options, registers=0, stack=0, shared=0, problem=f"error: {error!r}"
        )
    registers, stack = _resource_usage(compiled.asm["cubin"])
    shared = int(compiled.metadata.shared)
    instructions = count(compiled.asm["ptx"])
    problem = ""
    if shared > MAX_SHARED[arch]:
        problem = f"needs {shared} bytes of shared memory, sm_{arch} has {MAX_SHARED[arch]}"
    elif stack and arch not in case.may_spill:
        problem = f"uses {stack} bytes of stack"
    elif absent := missing(instructions, wanted):
        problem = f"has no {', '.join(absent)}"
    return CompileReport(
        case.name, name, arch, **options, registers=registers, stack=stack, shared=shared, problem=problem,
        instructions=instructions,
    )  # fmt: skip


def _specialise(kernel: Any, arguments: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (special and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_name(value)
        aligned = isinstance(value, torch.Tensor) and not parameter.do_not_specialize_on_alignment
        if aligned or (special and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    if arguments:
        raise TypeError(f"{kernel.fn.__name__} has no parameters {sorted(arguments)}")
    return signature, constants, attributes


def _type_name(value: object) -> str:
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(value, TensorDescriptor):
        box = ",".join(str(size) for size in value.block_shape)
        return f"tensordesc<{_POINTER_TYPES[value.base.dtype].removeprefix('*')}[{box}]>"
    if isinstance(value, torch.Tensor):
        return _POINTER_TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    raise TypeError(f"no kernel argument type for {value!r}")


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True)  # noqa: S603
        listing = done.stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    if found is None:
        raise RuntimeError(f"cuobjdump shows no resource usage: {listing!r}")
    return int(found[1]), int(found[2])


def compile_all(cases: Sequence[CompileCase], architectures: Sequence[int]) -> Iterator[CompileReport]:
    if not triton_installed() or interpreter_enabled():
        raise KernelUnavailable("ahead-of-time compilation needs triton-lang, and TRITON_INTERPRET unset")
    for case in cases:
        for arch in filter(case.least_arch.__le__, architectures):
            yield from compile_case(case, arch)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tidewheel_kernels.aot", description="Compile kernels without a GPU."
    )
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, choices=sorted(MAX_SHARED))
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], help="only these cases")
    parser.add_argument("--all", action="store_true", help="also the cases that are only recorded")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object per line")
    form.add_argument("--listing", action="store_true", help="also the instructions of each kernel")
    options = parser.parse_args(argv)
    cases = [case for case in CASES if (case.name in options.case if options.case else options.all or case.default)]
    failed = False
    for report in compile_all(cases, options.arch):
        failed |= bool(report.problem)
        sys.stdout.write(_json(report) if options.json else _line(report))
        if options.listing:
            sys.stdout.write(_listing(report.instructions))
        sys.stdout.flush()
    return int(failed)


def _json(report: CompileReport) -> str:
    return json.dumps(asdict(report) | {"resident": report.resident}) + "\n"


def _listing(instructions: InstructionCounts) -> str:
    return "    " + ", ".join(f"{name} {number}" for name, number in asdict(instructions).items() if number) + "\n"


def _line(report: CompileReport) -> str:
    return (
        f"{report.case:32} {report.kernel:26} sm_{report.arch:<4}"
        f"{report.num_warps:2} warps {report.num_stages} stages {report.registers:4} registers "
        f"{report.stack:5} stack {report.shared:7} shared {report.resident:3} resident {report.problem or 'ok'}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
