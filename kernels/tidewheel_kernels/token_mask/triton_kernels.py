import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import LaunchConfig, cdiv

CONFIG = LaunchConfig(block=1024, num_warps=4)


@triton.jit(do_not_specialize=["bits_stride"], do_not_specialize_on_alignment=["rows_ptr"])
def apply_token_mask_kernel(
    logits_ptr,  # [num_rows, vocabulary]
    rows_ptr,  # [num_entries]
    bits_ptr,  # [num_entries, words]
    logits_stride,
    bits_stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    # grid: [num_entries, cdiv(vocabulary, BLOCK)]
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + entry).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    word = tl.load(bits_ptr + entry * bits_stride + token // 32, mask=inside, other=-1)
    is_allowed = (word >> (token % 32)) & 1
    # Allowed logits are neither read nor written.
    tl.store(logits_ptr + row * logits_stride + token, float("-inf"), mask=inside & (is_allowed == 0))


def apply_token_mask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    apply_token_mask_kernel[(rows.shape[0], cdiv(logits.shape[1], CONFIG.block))](
        logits_ptr=logits,
        rows_ptr=rows,
        bits_ptr=bits,
        logits_stride=logits.stride(0),
        bits_stride=bits.stride(0),
        vocabulary=logits.shape[1],
        BLOCK=CONFIG.block,
        num_warps=CONFIG.num_warps,
    )
