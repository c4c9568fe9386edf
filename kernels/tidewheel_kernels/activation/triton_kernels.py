from functools import lru_cache

import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import LaunchConfig, cdiv, elementwise_config, starts_early
from tidewheel_kernels.triton_early import wait_for_inputs
from tidewheel_kernels.triton_launch import MAX_LAUNCHES, KernelLauncher


@triton.jit
def silu_and_mul_kernel(
    gate_up_ptr,  # [num_tokens, 2 * size]
    out_ptr,  # [num_tokens, size]
    gate_up_stride,
    size,
    STARTS_EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: [num_tokens, cdiv(size, BLOCK)]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    row_ptr = gate_up_ptr + token * gate_up_stride
    wait_for_inputs(STARTS_EARLY)
    gate = tl.load(row_ptr + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + size + column, mask=mask, other=0.0).to(tl.float32)
    activated = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * size + column, activated.to(out_ptr.dtype.element_ty), mask=mask)


@lru_cache(MAX_LAUNCHES)
def _launch(config: LaunchConfig, stride: int, size: int, early: bool) -> KernelLauncher:
    constants = {"gate_up_stride": stride, "size": size, "STARTS_EARLY": early, "BLOCK": config.block}
    return KernelLauncher(silu_and_mul_kernel, constants, num_warps=config.num_warps, launch_pdl=early)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, size))
    if num_tokens:
        config = elementwise_config(size)
        launch = _launch(config, gate_up.stride(0), size, starts_early(gate_up.device))
        launch((num_tokens, cdiv(size, config.block), 1), (gate_up, out))
    return out
