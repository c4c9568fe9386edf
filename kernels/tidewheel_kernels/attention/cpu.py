from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention

from tidewheel_kernels.attention.cpu_plan import AttentionGroup, AttentionPlan, PlanKey, make_plan
from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.attention.reference import paged_attention_reference
from tidewheel_kernels.kv_cache.codes import INT8

_plans: WeakKeyDictionary[AttentionMetadata, dict[PlanKey, AttentionPlan]] = WeakKeyDictionary()


def paged_attention_cpu(
    q: torch.Tensor,
    k_cache: torch.Tensor,  # contiguous, unless of codes
    v_cache: torch.Tensor,  # like k_cache
    meta: AttentionMetadata,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    scales: torch.Tensor | None,
) -> None:
    """Compute attention in torch, by groups of rows: gather keys and values, then attend densely."""
    if k_cache.dtype == INT8:
        paged_attention_reference(q, k_cache, v_cache, meta, out, scale, sliding_window, soft_cap, scales)
        return
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    if scales is not None:
        by_head = scales.to(q.dtype).repeat_interleave(q.shape[1] // num_kv_heads, dim=1).unsqueeze(-1)
        q = q * by_head[0]
    plan = _planned(meta, PlanKey(block_size, q.shape[1], num_kv_heads, head_dim, sliding_window, q.dtype))
    for group in plan.groups:
        attend = _attend_decodes if group.query_len == 1 else _attend_chunks
        attended = attend(q.index_select(0, group.rows), k_cache, v_cache, group, scale, soft_cap)
        out.index_copy_(0, group.rows, attended)
    if plan.empty_rows.numel():
        out.index_fill_(0, plan.empty_rows, 0.0)
    if scales is not None:
        out.mul_(by_head[1])


def _planned(meta: AttentionMetadata, key: PlanKey) -> AttentionPlan:
    plans = _plans.setdefault(meta, {})
    if key not in plans:
        plans[key] = make_plan(meta, key)
    return plans[key]


def _attend_decodes(
    queries: torch.Tensor,  # [num_seqs, num_q_heads, head_dim]
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: AttentionGroup,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    num_kv_heads, head_dim = k_cache.shape[2:]
    k, v = (
        cache.view(-1, num_kv_heads * head_dim)
        .index_select(0, group.gather)
        .to(queries.dtype)
        .view(group.num_seqs, -1, num_kv_heads, head_dim)
        .transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    by_kv_head = queries.view(group.num_seqs, num_kv_heads, -1, head_dim)
    return _attend(by_kv_head, k, v, group, scale, soft_cap).reshape_as(queries)


def _attend_chunks(
    queries: torch.Tensor,  # [num_seqs * query_len, num_q_heads, head_dim]
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: AttentionGroup,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    num_q_heads, head_dim = queries.shape[1:]
    k, v = (
        cache.view(-1, head_dim)
        .index_select(0, group.gather)
        .to(queries.dtype)
        .view(group.num_seqs, num_q_heads, -1, head_dim)
        for cache in (k_cache, v_cache)
    )
    by_head = queries.view(group.num_seqs, group.query_len, num_q_heads, head_dim).transpose(1, 2)
    return _attend(by_head, k, v, group, scale, soft_cap).transpose(1, 2).reshape_as(queries)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: AttentionGroup, scale: float, soft_cap: float
) -> torch.Tensor:
    if soft_cap == 0:
        mask = None if group.is_causal else group.mask
        return scaled_dot_product_attention(q, k, v, mask, is_causal=group.is_causal, scale=scale)
    logits = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if group.mask is not None:
        logits += group.mask
    return torch.matmul(torch.softmax(logits, dim=-1), v.float()).to(q.dtype)
