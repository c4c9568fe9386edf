import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import cdiv, copy_config, elementwise_config

LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn


@triton.jit
def scaled(values, scale):
    """Return values divided by the scale and saturated for 8-bit floats; NaN stays."""
    return tl.clamp(tl.div_rn(values.to(tl.float32), scale), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def slot_ptr(cache_ptr, slot, block_size, block_stride, offset_stride):
    return cache_ptr + slot // block_size * block_stride + slot % block_size * offset_stride


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr", "scales_ptr"])
def write_kv_cache_kernel(
    k_ptr,  # [num_tokens, num_kv_heads, head_dim]
    v_ptr,  # like k_ptr
    slot_mapping_ptr,  # [num_tokens]
    k_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache_ptr,  # like k_cache_ptr
    scales_ptr,  # [2, num_kv_heads], for 8 bits
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_cache_block_stride,
    k_cache_offset_stride,
    k_cache_head_stride,
    v_cache_block_stride,
    v_cache_offset_stride,
    v_cache_head_stride,
    size,  # num_kv_heads * head_dim
    head_dim,
    block_size,
    BLOCK: tl.constexpr,
):
    # grid: [num_tokens, cdiv(size, BLOCK)]
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = element < size
        head = element // head_dim
        column = element % head_dim
        k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + column, mask=mask, other=0.0)
        v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + column, mask=mask, other=0.0)
        k_slot_ptr = slot_ptr(k_cache_ptr, slot, block_size, k_cache_block_stride, k_cache_offset_stride)
        v_slot_ptr = slot_ptr(v_cache_ptr, slot, block_size, v_cache_block_stride, v_cache_offset_stride)
        if k_cache_ptr.dtype.element_ty == tl.float8e4nv:
            k = scaled(k, tl.load(scales_ptr + head, mask=mask, other=1.0))
            v = scaled(v, tl.load(scales_ptr + size // head_dim + head, mask=mask, other=1.0))
        k = k.to(k_cache_ptr.dtype.element_ty)
        v = v.to(v_cache_ptr.dtype.element_ty)
        tl.store(k_slot_ptr + head * k_cache_head_stride + column, k, mask=mask)
        tl.store(v_slot_ptr + head * v_cache_head_stride + column, v, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["src_ptr", "dst_ptr"])
def copy_blocks_kernel(
    cache_ptr,  # [num_caches, num_blocks, block_numel]
    src_ptr,  # [num_copies]
    dst_ptr,  # [num_copies]
    cache_stride,
    block_stride,
    block_numel,
    BLOCK: tl.constexpr,
):
    # grid: [num_copies, num_caches, cdiv(block_numel, BLOCK)]
    copy = tl.program_id(0)
    base_ptr = cache_ptr + tl.program_id(1).to(tl.int64) * cache_stride
    src = tl.load(src_ptr + copy).to(tl.int64)
    dst = tl.load(dst_ptr + copy).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = element < block_numel
    tl.store(
        base_ptr + dst * block_stride + element,
        tl.load(base_ptr + src * block_stride + element, mask=mask),
        mask=mask,
    )


def write_kv_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    size = num_kv_heads * head_dim
    config = elementwise_config(size)
    write_kv_cache_kernel[(num_tokens, cdiv(size, config.block))](
        k_ptr=k,
        v_ptr=v,
        slot_mapping_ptr=slot_mapping,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        scales_ptr=k if scales is None else scales,
        k_token_stride=k.stride(0),
        k_head_stride=k.stride(1),
        v_token_stride=v.stride(0),
        v_head_stride=v.stride(1),
        k_cache_block_stride=k_cache.stride(0),
        k_cache_offset_stride=k_cache.stride(1),
        k_cache_head_stride=k_cache.stride(2),
        v_cache_block_stride=v_cache.stride(0),
        v_cache_offset_stride=v_cache.stride(1),
        v_cache_head_stride=v_cache.stride(2),
        size=size,
        head_dim=head_dim,
        block_size=k_cache.shape[1],
        BLOCK=config.block,
        num_warps=config.num_warps,
    )


def copy_blocks(stack: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    if not stack[0, 0].is_contiguous():
        raise ValueError(f"the elements of a block must be contiguous, got strides {stack.stride()}")
    block_numel = stack[0, 0].numel()
    config = copy_config(block_numel)
    copy_blocks_kernel[(src.shape[0], stack.shape[0], cdiv(block_numel, config.block))](
        cache_ptr=stack,
        src_ptr=src,
        dst_ptr=dst,
        cache_stride=stack.stride(0),
        block_stride=stack.stride(1),
        block_numel=block_numel,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )
