import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import cdiv, elementwise_config


@triton.jit
def silu_and_mul_kernel(
    gate_up_ptr,  # [num_tokens, 2 * size]
    out_ptr,  # [num_tokens, size]
    gate_up_stride,
    size,
    BLOCK: tl.constexpr,
):
    # grid: [num_tokens, cdiv(size, BLOCK)]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    row_ptr = gate_up_ptr + token * gate_up_stride
    gate = tl.load(row_ptr + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + size + column, mask=mask, other=0.0).to(tl.float32)
    activated = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * size + column, activated.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        config = elementwise_config(size)
        silu_and_mul_kernel[(num_tokens, cdiv(size, config.block))](
            gate_up_ptr=gate_up,
            out_ptr=out,
            gate_up_stride=gate_up.stride(0),
            size=size,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )
    return out
