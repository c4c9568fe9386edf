"""Log-softmax of one token per row, and its rank: two passes over the row, no sort."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import vocabulary_config
from tidewheel_kernels.logprobs import ChosenLogprobs


@triton.jit
def chosen_logprobs_kernel(
    logits_ptr,  # [num_rows, vocabulary]
    token_ids_ptr,  # [num_rows]
    logprobs_ptr,  # [num_rows] float32
    ranks_ptr,  # [num_rows] int32
    log_normalizer_ptr,  # [num_rows] float32
    logits_stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    # grid: [num_rows]
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    token = tl.load(token_ids_ptr + row)
    valid = (token >= 0) & (token < vocabulary)
    chosen = tl.load(row_ptr + token, mask=valid, other=float("nan")).to(tl.float32)

    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
    max_logit = tl.max(largest, axis=0)

    weight = tl.zeros([BLOCK], dtype=tl.float32)
    num_better = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        weight += tl.exp(x - max_logit)
        num_better += (x > chosen).to(tl.int32)
    log_normalizer = max_logit + tl.log(tl.sum(weight, axis=0))

    tl.store(logprobs_ptr + row, chosen - log_normalizer)
    tl.store(ranks_ptr + row, tl.where(valid, 1 + tl.sum(num_better, axis=0), 0))
    tl.store(log_normalizer_ptr + row, log_normalizer)


def chosen_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> ChosenLogprobs:
    num_rows, vocabulary = logits.shape
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    log_normalizer = torch.empty_like(logprobs)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        config = vocabulary_config(vocabulary)
        chosen_logprobs_kernel[(num_rows,)](
            logits_ptr=logits,
            token_ids_ptr=token_ids,
            logprobs_ptr=logprobs,
            ranks_ptr=ranks,
            log_normalizer_ptr=log_normalizer,
            logits_stride=logits.stride(0),
            vocabulary=vocabulary,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )
    return ChosenLogprobs(logprobs, ranks, log_normalizer)
