"""Kernels that change single logits, one lane per (row, token) entry."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import LaunchConfig, cdiv
from tidewheel_kernels.penalties import PenaltyTensors

CONFIG = LaunchConfig(block=256, num_warps=4)


# Columns of varying length lie behind one another in memory, at any alignment.
@triton.jit(
    do_not_specialize=["num_rows", "num_entries"],
    do_not_specialize_on_alignment=[
        "rows_ptr", "token_ids_ptr", "output_counts_ptr", "in_prompt_ptr", "repetition_ptr", "presence_ptr",
        "frequency_ptr",
    ],
)  # fmt: skip
def apply_penalties_kernel(
    logits_ptr,  # [num_rows, vocabulary]
    rows_ptr,  # [num_entries]
    token_ids_ptr,  # [num_entries]
    output_counts_ptr,  # [num_entries]
    in_prompt_ptr,  # [num_entries]
    repetition_ptr,  # [num_rows]
    presence_ptr,  # [num_rows]
    frequency_ptr,  # [num_rows]
    logits_stride,
    num_rows,
    vocabulary,
    num_entries,
    BLOCK: tl.constexpr,
):
    # grid: [cdiv(num_entries, BLOCK)]
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < num_entries
    row = tl.load(rows_ptr + entry, mask=mask, other=-1)
    token = tl.load(token_ids_ptr + entry, mask=mask, other=-1)
    mask = mask & (row >= 0) & (row < num_rows) & (token >= 0) & (token < vocabulary)
    count = tl.load(output_counts_ptr + entry, mask=mask, other=0)
    in_prompt = tl.load(in_prompt_ptr + entry, mask=mask, other=0)
    occurred = (count > 0) | (in_prompt != 0)
    repetition = tl.where(occurred, tl.load(repetition_ptr + row, mask=mask, other=1.0), 1.0)
    presence = tl.load(presence_ptr + row, mask=mask, other=0.0)
    frequency = tl.load(frequency_ptr + row, mask=mask, other=0.0)
    logit_ptr = logits_ptr + row.to(tl.int64) * logits_stride + token
    x = tl.load(logit_ptr, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(x > 0.0, x / repetition, x * repetition)
    x = x - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
    tl.store(logit_ptr, x.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "num_entries"],
    do_not_specialize_on_alignment=["rows_ptr", "token_ids_ptr", "values_ptr"],
)
def apply_logit_bias_kernel(
    logits_ptr,  # [num_rows, vocabulary]
    rows_ptr,  # [num_entries]
    token_ids_ptr,  # [num_entries]
    values_ptr,  # [num_entries]
    logits_stride,
    num_rows,
    vocabulary,
    num_entries,
    BLOCK: tl.constexpr,
):
    # grid: [cdiv(num_entries, BLOCK)]
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < num_entries
    row = tl.load(rows_ptr + entry, mask=mask, other=-1)
    token = tl.load(token_ids_ptr + entry, mask=mask, other=-1)
    mask = mask & (row >= 0) & (row < num_rows) & (token >= 0) & (token < vocabulary)
    value = tl.load(values_ptr + entry, mask=mask, other=0.0)
    tl.atomic_add(logits_ptr + row.to(tl.int64) * logits_stride + token, value, mask=mask)


def apply_penalties(logits: torch.Tensor, penalties: PenaltyTensors) -> None:
    num_entries = penalties.rows.shape[0]
    apply_penalties_kernel[(cdiv(num_entries, CONFIG.block),)](
        logits_ptr=logits,
        rows_ptr=penalties.rows,
        token_ids_ptr=penalties.token_ids,
        output_counts_ptr=penalties.output_counts,
        in_prompt_ptr=penalties.in_prompt.view(torch.uint8),
        repetition_ptr=penalties.repetition,
        presence_ptr=penalties.presence,
        frequency_ptr=penalties.frequency,
        logits_stride=logits.stride(0),
        num_rows=logits.shape[0],
        vocabulary=logits.shape[1],
        num_entries=num_entries,
        BLOCK=CONFIG.block,
        num_warps=CONFIG.num_warps,
    )


def apply_logit_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    num_entries = rows.shape[0]
    apply_logit_bias_kernel[(cdiv(num_entries, CONFIG.block),)](
        logits_ptr=logits,
        rows_ptr=rows,
        token_ids_ptr=token_ids,
        values_ptr=values,
        logits_stride=logits.stride(0),
        num_rows=logits.shape[0],
        vocabulary=logits.shape[1],
        num_entries=num_entries,
        BLOCK=CONFIG.block,
        num_warps=CONFIG.num_warps,
    )
