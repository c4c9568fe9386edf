from __future__ import annotations

import torch

from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.kv_cache.codes import INT8, scales_behind
from tidewheel_kernels.kv_cache.reference import scales_of


def paged_attention_reference(
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
    starts = meta.host_cu_seqlens_q().tolist()
    group = q.shape[1] // k_cache.shape[2]
    for i, seq_len in enumerate(meta.host_seq_lens().tolist()):
        queries = q[starts[i] : starts[i + 1]].float()
        keys, values = (
            _gathered(cache, meta.block_tables[i], seq_len, of_heads).repeat_interleave(group, dim=1)
            for cache, of_heads in zip((k_cache, v_cache), scales_of(scales), strict=True)
        )
        logits = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        if soft_cap > 0:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        visible = visible_keys(queries.shape[0], seq_len, sliding_window, device=q.device)
        logits = logits.masked_fill(~visible, float("-inf"))
        # Padding sees no key: its softmax is NaN.
        weights = torch.softmax(logits, dim=-1).nan_to_num(nan=0.0) if seq_len == 0 else torch.softmax(logits, dim=-1)
        out[starts[i] : starts[i + 1]] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


def visible_keys(query_len: int, seq_len: int, sliding_window: int, *, device: torch.device) -> torch.Tensor:
    """Return bool [query_len, seq_len]: whether each of the last `query_len` tokens attends to each key."""
    position = torch.arange(seq_len - query_len, seq_len, device=device).unsqueeze(1)
    key = torch.arange(seq_len, device=device).unsqueeze(0)
    visible = key <= position
    return visible & (key > position - sliding_window) if sliding_window > 0 else visible


def _gathered(
    cache: torch.Tensor, block_table: torch.Tensor, seq_len: int, scales: torch.Tensor | None
) -> torch.Tensor:
    """Return keys or values of a sequence, [seq_len, num_kv_heads, head_dim] float32."""
    block_size = cache.shape[1]
    blocks = block_table[: -(-seq_len // block_size)].long()
    rows = cache[blocks].flatten(0, 1)[:seq_len].float()
    if cache.dtype == INT8:
        scales = scales_behind(cache)[blocks].flatten(0, 1)[:seq_len]
    return rows if scales is None else rows * scales.unsqueeze(-1)
