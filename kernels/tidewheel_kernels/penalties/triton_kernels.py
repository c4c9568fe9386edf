"""Kernels that change single logits: a lane per token or entry, a warp per forbidden word."""

import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import LaunchConfig, cdiv
from tidewheel_kernels.penalties.reference import PenaltyTensors, TokenHistory, WordTensors

CONFIG = LaunchConfig(block=256, num_warps=4)
WORD_CONFIG = LaunchConfig(block=32, num_warps=1)
IN_PROMPT = tl.constexpr(1 << 30)  # above every count


@triton.jit
def _token(tokens_ptr, ends_ptr, row, num_tokens, position, vocabulary):
    first = tl.load(ends_ptr + row) - num_tokens
    token = tl.load(tokens_ptr + first + position, mask=position < num_tokens, other=-1)
    return tl.where(token < vocabulary, token, -1)


# Columns lie at any alignment.
@triton.jit(do_not_specialize_on_alignment=["ends_ptr", "rows_ptr", "num_prompt_tokens_ptr", "num_tokens_ptr"])
def count_tokens_kernel(
    counts_ptr,  # [num_entries, vocabulary] int32, zeros; gets output counts and IN_PROMPT
    tokens_ptr,  # [all tokens]
    ends_ptr,  # [num_rows]
    rows_ptr,  # [num_entries]
    num_prompt_tokens_ptr,  # [num_entries]
    num_tokens_ptr,  # [num_entries]
    vocabulary,
    BLOCK: tl.constexpr,
):
    # grid: [num_entries, cdiv(max_num_tokens, BLOCK)]
    entry = tl.program_id(0)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, num_tokens = tl.load(rows_ptr + entry), tl.load(num_tokens_ptr + entry)
    token = _token(tokens_ptr, ends_ptr, row, num_tokens, position, vocabulary)
    is_output = position >= tl.load(num_prompt_tokens_ptr + entry)
    count_ptr = counts_ptr + entry.to(tl.int64) * vocabulary + token
    tl.atomic_add(count_ptr, 1, mask=(token >= 0) & is_output, sem="relaxed")
    tl.atomic_or(count_ptr, IN_PROMPT, mask=(token >= 0) & ~is_output, sem="relaxed")


@triton.jit(
    do_not_specialize_on_alignment=[
        "ends_ptr", "rows_ptr", "num_tokens_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr",
    ],
)  # fmt: skip
def apply_penalties_kernel(
    logits_ptr,  # [num_rows, vocabulary]
    counts_ptr,  # [num_entries, vocabulary]
    tokens_ptr,  # [all tokens]
    ends_ptr,  # [num_rows]
    rows_ptr,  # [num_entries]
    num_tokens_ptr,  # [num_entries]
    repetition_ptr,  # [num_entries]
    presence_ptr,  # [num_entries]
    frequency_ptr,  # [num_entries]
    logits_stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    # grid: [num_entries, cdiv(max_num_tokens, BLOCK)]
    entry = tl.program_id(0)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, num_tokens = tl.load(rows_ptr + entry), tl.load(num_tokens_ptr + entry)
    token = _token(tokens_ptr, ends_ptr, row, num_tokens, position, vocabulary)
    # One of equal tokens takes the count and changes the logit.
    count_ptr = counts_ptr + entry.to(tl.int64) * vocabulary + token
    taken = tl.atomic_xchg(count_ptr, tl.zeros([BLOCK], tl.int32), mask=token >= 0, sem="relaxed")
    mask = (token >= 0) & (taken != 0)
    count = taken & (IN_PROMPT - 1)
    logit_ptr = logits_ptr + row.to(tl.int64) * logits_stride + token
    x = tl.load(logit_ptr, mask=mask, other=0.0).to(tl.float32)
    repetition = tl.load(repetition_ptr + entry)
    x = tl.where(x > 0.0, x / repetition, x * repetition)
    x = x - tl.load(frequency_ptr + entry) * count.to(tl.float32)
    x = x - tl.where(count > 0, tl.load(presence_ptr + entry), 0.0)
    tl.store(logit_ptr, x.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["ends_ptr", "rows_ptr", "starts_ptr", "lengths_ptr", "token_ids_ptr"])
def forbid_words_kernel(
    logits_ptr,  # [num_rows, vocabulary]
    tokens_ptr,  # [all tokens]
    ends_ptr,  # [num_rows]
    rows_ptr,  # [num_words]
    starts_ptr,  # [num_words]
    lengths_ptr,  # [num_words]
    token_ids_ptr,  # [tokens of all words]
    logits_stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    # grid: [num_words]
    word = tl.program_id(0)
    row, num_before = tl.load(rows_ptr + word), tl.load(lengths_ptr + word) - 1
    word_ptr = token_ids_ptr + tl.load(starts_ptr + word)
    text_ptr = tokens_ptr + tl.load(ends_ptr + row) - num_before
    num_different = 0
    for first in range(0, num_before, BLOCK):
        i = first + tl.arange(0, BLOCK)
        expected = tl.load(word_ptr + i, mask=i < num_before, other=-1)
        actual = tl.load(text_ptr + i, mask=i < num_before, other=-1)
        num_different += tl.sum((expected != actual).to(tl.int32), axis=0)
    last = tl.load(word_ptr + num_before)
    mask = (num_different == 0) & (last >= 0) & (last < vocabulary)
    logit_ptr = logits_ptr + row.to(tl.int64) * logits_stride + last
    x = tl.load(logit_ptr, mask=mask, other=0.0)
    tl.store(logit_ptr, x + float("-inf"), mask=mask)


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


def apply_penalties(logits: torch.Tensor, history: TokenHistory, penalties: PenaltyTensors) -> None:
    num_entries, vocabulary = penalties.rows.shape[0], logits.shape[1]
    counts = torch.zeros(num_entries, vocabulary, dtype=torch.int32, device=logits.device)
    grid = (num_entries, cdiv(penalties.max_num_tokens, CONFIG.block))
    count_tokens_kernel[grid](
        counts_ptr=counts,
        tokens_ptr=history.tokens,
        ends_ptr=history.ends,
        rows_ptr=penalties.rows,
        num_prompt_tokens_ptr=penalties.num_prompt_tokens,
        num_tokens_ptr=penalties.num_tokens,
        vocabulary=vocabulary,
        BLOCK=CONFIG.block,
        num_warps=CONFIG.num_warps,
    )
    apply_penalties_kernel[grid](
        logits_ptr=logits,
        counts_ptr=counts,
        tokens_ptr=history.tokens,
        ends_ptr=history.ends,
        rows_ptr=penalties.rows,
        num_tokens_ptr=penalties.num_tokens,
        repetition_ptr=penalties.repetition,
        presence_ptr=penalties.presence,
        frequency_ptr=penalties.frequency,
        logits_stride=logits.stride(0),
        vocabulary=vocabulary,
        BLOCK=CONFIG.block,
        num_warps=CONFIG.num_warps,
    )


def forbid_words(logits: torch.Tensor, history: TokenHistory, words: WordTensors) -> None:
    forbid_words_kernel[(words.rows.shape[0],)](
        logits_ptr=logits,
        tokens_ptr=history.tokens,
        ends_ptr=history.ends,
        rows_ptr=words.rows,
        starts_ptr=words.starts,
        lengths_ptr=words.lengths,
        token_ids_ptr=words.token_ids,
        logits_stride=logits.stride(0),
        vocabulary=logits.shape[1],
        BLOCK=WORD_CONFIG.block,
        num_warps=WORD_CONFIG.num_warps,
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
