from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

# 0x10 is cp.async's size in bytes.
_PATTERNS = {
    "tma_loads": r"cp\.async\.bulk\.tensor\.\dd\.shared",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "waits": r"griddepcontrol\.wait",
    "early_loads": r"ld\.global(?=[\s\S]*griddepcontrol\.wait)",
    "mma": r"\bmma\.sync",
    "wide_loads": r"ld\.global\.(?:[\w:]+\.)*(?:v4\.b32|v2\.b64)|cp\.async\.cg\.shared\.global[^;]*?, 0x10\b",
    "narrow_loads": r"ld\.global\.(?![^ ]*(?:v4\.b32|v2\.b64))|cp\.async\.ca\.shared\.global",
    "wide_stores": r"st\.global\.(?:[\w:]+\.)*(?:v4\.b32|v2\.b64)",
    "narrow_stores": r"st\.global\.(?![^ ]*(?:v4\.b32|v2\.b64))",
}
# All large accesses must be wide.
_STREAMING = {
    "rms_norm_kernel",
    "silu_and_mul_kernel",
    "rope_and_cache_kernel",
    "write_kv_cache_kernel",
    "copy_blocks_kernel",
}


@dataclass(frozen=True)
class InstructionCounts:
    """Numbers of instructions of a kernel; wide: 16 bytes per thread."""

    tma_loads: int
    wgmma: int
    tcgen05: int
    mma: int
    waits: int  # for the previous kernel
    early_loads: int  # before it
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    narrow_stores: int


NONE = InstructionCounts(*[0] * 10)


def count(ptx: str) -> InstructionCounts:
    return InstructionCounts(**{name: len(re.findall(pattern, ptx)) for name, pattern in _PATTERNS.items()})


def expected(kernel: str, arguments: Mapping[str, Any], arch: int) -> tuple[str, ...]:
    if kernel == "rope_and_cache_kernel" and arguments["BLOCK_HEADS"] * arguments["BLOCK_HALF"] < 512:
        return ()  # below 16 bytes for each of 64 threads
    if kernel == "write_kv_cache_kernel" and arguments["k_cache_ptr"].itemsize == 1:
        return ("wide_loads",)
    if kernel in _STREAMING:
        return "wide_loads", "wide_stores", *(["waits"] if arguments.get("STARTS_EARLY") else [])
    if kernel == "invariant_linear_kernel" and arguments["x_ptr"].itemsize == 2:
        return {90: "wgmma", 100: "tcgen05"}.get(arch, "mma"), "wide_loads"
    if kernel == "grouped_linear_kernel" and arguments["x_ptr"].itemsize == 2:
        return ("wide_loads",)
    q = arguments.get("q_ptr")
    # float32 uses no tensor cores.
    if not isinstance(q, torch.Tensor) or q.dtype == torch.float32:
        return ()
    if arguments.get("TMA"):
        return "tma_loads", "wgmma" if arch == 90 else "tcgen05", "wide_loads", "wide_stores"
    return "wide_loads", "wide_stores"


def missing(instructions: InstructionCounts, names: tuple[str, ...]) -> list[str]:
    counts = asdict(instructions)
    return [name for name in names if not counts[name]]
