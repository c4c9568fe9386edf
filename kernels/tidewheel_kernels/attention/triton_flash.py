"""Attention of prompts by FlashAttention-3 (Shah et al. 2024), an optional package."""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache
from typing import NamedTuple

import torch

from tidewheel_kernels.attention import triton_kernels
from tidewheel_kernels.attention.call_shape import call_shape
from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.attention.triton_decode import launch_decode
from tidewheel_kernels.choice import ENVIRONMENT_VARIABLE, preference_for
from tidewheel_kernels.launch_config import architecture, decode_config
from tidewheel_kernels.switches import KernelUnavailable

FIRST_TORCH = (2, 13)  # first with block tables in `varlen_attn_out`
LIBRARY = "flash_attn_interface"
logger = logging.getLogger(__name__)


class PromptCall(NamedTuple):
    """Properties of prompts that FlashAttention-3 may refuse."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    soft_cap: float


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    scales: torch.Tensor | None,
) -> None:
    has_prompts = meta.num_seqs > meta.num_decodes
    if not has_prompts or not takes(PromptCall(q.device, q.dtype, k_cache.dtype, soft_cap)):
        triton_kernels.paged_attention(q, k_cache, v_cache, meta, out, scale, sliding_window, soft_cap, scales)
        return
    attend_prompts(q, k_cache, v_cache, meta, out, scale, sliding_window)
    if meta.num_decodes:
        shape = call_shape(q, k_cache, v_cache, meta, out, scale, sliding_window, soft_cap)
        config = decode_config(shape.head_dim, shape.group, shape.block_size, q.element_size())
        launch_decode(q, k_cache, v_cache, meta, out, shape, config, None)


def attend_prompts(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
) -> None:
    """Write only the rows of `out` that belong to prompts."""
    from torch.nn.attention.varlen import varlen_attn_out

    first = meta.num_decodes
    varlen_attn_out(
        out, q, k_cache, v_cache, meta.cu_seqlens_q[first:], None, meta.max_seqlen_q, meta.max_seq_len,
        scale=scale, enable_gqa=True, seqused_k=meta.seq_lens[first:], block_table=meta.block_tables[first:],
        window_size=(sliding_window - 1, 0),  # keys before the query; -1: all
    )  # fmt: skip


@lru_cache
def takes(call: PromptCall) -> bool:
    """Return whether FlashAttention-3 supports such prompts, and activate it in torch.

    Raise `KernelUnavailable` if it does not and the environment demands it.
    """
    obstacle = objection_here(call)
    if obstacle is None:
        torch.nn.attention.activate_flash_attention_impl("FA3")
        return True
    if preference_for("paged_attention") == "flash":
        raise KernelUnavailable(
            f"{ENVIRONMENT_VARIABLE} has paged_attention=flash, and FlashAttention-3 {obstacle}; leave it out"
        )
    logger.info("prompts are not for FlashAttention-3, which %s", obstacle)
    return False


def objection_here(call: PromptCall) -> str | None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return objection(call, version, architecture(call.device), importlib.util.find_spec(LIBRARY) is not None)


def objection(call: PromptCall, version: tuple[int, ...], capability: int, has_library: bool) -> str | None:
    """Return why FlashAttention-3 does not support such prompts, or None."""
    dtype, of_cache = (str(name).removeprefix("torch.") for name in (call.dtype, call.cache_dtype))
    checks = (
        (version >= FIRST_TORCH, f"needs torch {FIRST_TORCH[0]}.{FIRST_TORCH[1]}, not {version[0]}.{version[1]}"),
        (call.device.type == "cuda", f"needs CUDA tensors, not those of the device {call.device.type}"),
        (capability == 90, f"needs compute capability 9.0, not {capability // 10}.{capability % 10}"),
        (has_library, f"needs the module {LIBRARY}, which is not installed"),
        (call.dtype in (torch.bfloat16, torch.float16), f"takes bfloat16 and float16, not {dtype}"),
        (call.cache_dtype == call.dtype, f"takes keys in the dtype of queries, {dtype}, not {of_cache}"),
        (call.soft_cap == 0, f"is called by torch without a soft cap, and logits have one of {call.soft_cap:g}"),
    )
    return next((obstacle for holds, obstacle in checks if not holds), None)
