"""Log-probabilities with one read of each logit.

The first launch stores, for each chunk of 512 logits, the largest, the sum of exponentials, and the number not below
the chosen token's. The second combines them, and finds each next token in the chunk of largest maximum.
"""

import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import (
    cdiv,
    multiprocessors,
    next_power_of_2,
    vocabulary_config,
    vocabulary_programs,
)
from tidewheel_kernels.logprobs.reference import LogprobsOutput
from tidewheel_kernels.triton_vocabulary import (
    LOG2_E,
    chunk_maxima,
    chunk_weights,
    load_logits,
    load_maxima,
    load_tile,
)


@triton.jit
def _chosen_logit(row_ptr, token, vocabulary):
    return tl.load(row_ptr + token, mask=(token >= 0) & (token < vocabulary), other=float("nan")).to(tl.float32)


@triton.jit(do_not_specialize=["tiles_per_program"], do_not_specialize_on_alignment=["token_ids_ptr"])
def logprob_partials_kernel(
    logits_ptr,  # [num_rows, vocabulary]
    token_ids_ptr,  # [num_rows]
    partials_ptr,  # [num_rows, 3, num_chunks] float32: maxima, weights, logits not below the chosen
    logits_stride,
    vocabulary,
    num_chunks,
    tiles_per_program,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # grid: [num_rows, programs per row]
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    maxima_ptr = partials_ptr + row * 3 * num_chunks
    chosen = _chosen_logit(row_ptr, tl.load(token_ids_ptr + row), vocabulary)
    first_tile = tl.program_id(1) * tiles_per_program
    for i in range(tiles_per_program):
        first_chunk = (first_tile + i) * TILE
        chunk = first_chunk + tl.arange(0, TILE)
        x = load_tile(row_ptr, first_chunk, vocabulary, TILE, CHUNK)
        maxima = chunk_maxima(x)
        not_below = tl.sum(tl.where(x >= chosen, 1.0, 0.0), axis=1)
        inside = chunk < num_chunks
        tl.store(maxima_ptr + chunk, maxima, mask=inside)
        tl.store(maxima_ptr + num_chunks + chunk, chunk_weights(x, maxima, LOG2_E), mask=inside)
        tl.store(maxima_ptr + 2 * num_chunks + chunk, not_below, mask=inside)


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["token_ids_ptr"])
def logprobs_kernel(
    logits_ptr,  # [num_rows, vocabulary]
    token_ids_ptr,  # [num_rows]
    partials_ptr,  # [num_rows, 3, num_chunks]
    logprobs_ptr,  # [num_rows] float32
    ranks_ptr,  # [num_rows] int32
    top_ids_ptr,  # [num_rows, num_top] int64
    top_logprobs_ptr,  # [num_rows, num_top] float32
    logits_stride,
    vocabulary,
    num_chunks,
    num_top,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # grid: [num_rows]
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    maxima_ptr = partials_ptr + row * 3 * num_chunks
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    maxima, max_logit, _ = load_maxima(maxima_ptr, num_chunks, CHUNKS)
    weights = tl.load(maxima_ptr + num_chunks + chunk, mask=inside, other=0.0)
    not_below = tl.load(maxima_ptr + 2 * num_chunks + chunk, mask=inside, other=0.0)
    total = tl.sum(weights * tl.exp2((maxima - max_logit) * LOG2_E), axis=0)
    log_normalizer = max_logit + tl.log(total)

    token = tl.load(token_ids_ptr + row)
    tl.store(logprobs_ptr + row, _chosen_logit(row_ptr, token, vocabulary) - log_normalizer)
    # Past the row stands -inf, which no rank may count.
    tl.store(ranks_ptr + row, tl.minimum(tl.sum(not_below, axis=0).to(tl.int32), vocabulary))

    # By falling logit, then rising id, the last token tells which chunks are left.
    open_chunks = inside
    last_value = max_logit
    last_token = -1
    for i in range(num_top):
        value = tl.max(tl.where(open_chunks, maxima, float("-inf")), axis=0)
        best = tl.min(tl.where(open_chunks & (maxima == value), chunk, CHUNKS), axis=0)
        column = best * CHUNK + tl.arange(0, CHUNK)
        x = load_logits(row_ptr, column, vocabulary)
        left = (x < last_value) | ((x == last_value) & (column > last_token))
        left = left & (column < vocabulary)
        next_token = tl.min(tl.where(left & (x == value), column, vocabulary), axis=0)
        left = left & (column != next_token)
        maxima = tl.where(chunk == best, tl.max(tl.where(left, x, float("-inf")), axis=0), maxima)
        open_chunks = open_chunks & ((chunk != best) | (tl.sum(left.to(tl.int32), axis=0) > 0))
        last_value = value
        last_token = next_token
        # No chunk holds `value` in a row with NaN.
        tl.store(top_ids_ptr + row * num_top + i, tl.where(next_token < vocabulary, next_token, -1).to(tl.int64))
        tl.store(top_logprobs_ptr + row * num_top + i, value - log_normalizer)


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobsOutput:
    num_rows, vocabulary = logits.shape
    config = vocabulary_config(vocabulary)
    output = LogprobsOutput(
        logprobs=torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        ranks=torch.empty(num_rows, dtype=torch.int32, device=logits.device),
        top_token_ids=torch.empty(num_rows, num_top, dtype=torch.int64, device=logits.device),
        top_logprobs=torch.empty(num_rows, num_top, dtype=torch.float32, device=logits.device),
    )
    if not num_rows:
        return output
    partials = torch.empty(num_rows, 3, config.num_chunks, dtype=torch.float32, device=logits.device)
    programs = vocabulary_programs(num_rows, config.num_tiles, multiprocessors(logits.device))
    logprob_partials_kernel[(num_rows, programs)](
        logits_ptr=logits,
        token_ids_ptr=token_ids,
        partials_ptr=partials,
        logits_stride=logits.stride(0),
        vocabulary=vocabulary,
        num_chunks=config.num_chunks,
        tiles_per_program=cdiv(config.num_tiles, programs),
        TILE=config.tile,
        CHUNK=config.chunk,
        num_warps=config.num_warps,
    )
    logprobs_kernel[(num_rows,)](
        logits_ptr=logits,
        token_ids_ptr=token_ids,
        partials_ptr=partials,
        logprobs_ptr=output.logprobs,
        ranks_ptr=output.ranks,
        top_ids_ptr=output.top_token_ids,
        top_logprobs_ptr=output.top_logprobs,
        logits_stride=logits.stride(0),
        vocabulary=vocabulary,
        num_chunks=config.num_chunks,
        num_top=num_top,
        CHUNKS=next_power_of_2(config.num_chunks),
        CHUNK=config.chunk,
        num_warps=4,
    )
    return output
