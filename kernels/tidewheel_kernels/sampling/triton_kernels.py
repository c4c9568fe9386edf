"""Sampling in two launches: many programs read every logit once, then one program per row chooses.

The first stores the largest logit and the weight of each chunk of 512 logits; from these the second finds the chunks
to read again. Chunks are combined in one order, whatever the number of programs.
"""

import torch
import triton
import triton.language as tl

from tidewheel_kernels.launch_config import (
    VocabularyConfig,
    cdiv,
    multiprocessors,
    next_power_of_2,
    vocabulary_config,
    vocabulary_programs,
)
from tidewheel_kernels.sampling.reference import GREEDY_TEMPERATURE, SamplingTensors
from tidewheel_kernels.sampling.triton_filters import draw_from_candidates, draw_from_row, gather, lower_bound
from tidewheel_kernels.triton_vocabulary import (
    LOG2_E,
    chunk_maxima,
    chunk_weights,
    crossing,
    element,
    load_logits,
    load_maxima,
    load_tile,
)


@triton.jit(do_not_specialize=["tiles_per_program"], do_not_specialize_on_alignment=["temperature_ptr"])
def sample_partials_kernel(
    logits_ptr,  # [num_rows, vocabulary]
    partials_ptr,  # [num_rows, 2, num_chunks] float32: maxima, relative weights
    temperature_ptr,  # [num_rows]
    logits_stride,
    vocabulary,
    num_chunks,
    tiles_per_program,
    greedy_temperature,
    SAMPLED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # grid: [num_rows, programs per row]
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    maxima_ptr = partials_ptr + row * 2 * num_chunks
    first_tile = tl.program_id(1) * tiles_per_program
    if SAMPLED:
        scale = LOG2_E / tl.maximum(tl.load(temperature_ptr + row), greedy_temperature)
    for i in range(tiles_per_program):
        first_chunk = (first_tile + i) * TILE
        chunk = first_chunk + tl.arange(0, TILE)
        x = load_tile(row_ptr, first_chunk, vocabulary, TILE, CHUNK)
        maxima = chunk_maxima(x)
        tl.store(maxima_ptr + chunk, maxima, mask=chunk < num_chunks)
        if SAMPLED:
            weights = chunk_weights(x, maxima, scale)
            tl.store(maxima_ptr + num_chunks + chunk, weights, mask=chunk < num_chunks)


@triton.jit
def _largest_token(row_ptr, vocabulary, maxima, max_logit, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.min(tl.where(maxima == max_logit, tl.arange(0, CHUNKS), CHUNKS), axis=0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(row_ptr, column, vocabulary)
    return tl.min(tl.where(x == max_logit, column, vocabulary), axis=0)


@triton.jit
def _draw_from_chunk(
    row_ptr, vocabulary, maxima, weights, max_logit, scale, uniform, CHUNKS: tl.constexpr, CHUNK: tl.constexpr
):
    factors = tl.exp2((maxima - max_logit) * scale)
    weights = weights * factors
    cumulative = tl.cumsum(weights, axis=0)
    target = uniform * element(cumulative, CHUNKS - 1, CHUNKS)
    chunk = crossing(weights, cumulative, target, CHUNKS)
    before = element(cumulative, chunk - 1, CHUNKS)
    factor = element(factors, chunk, CHUNKS)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(row_ptr, column, vocabulary)
    inside = tl.exp2((x - tl.max(x, axis=0)) * scale)
    return chunk * CHUNK + crossing(inside, before + factor * tl.cumsum(inside, axis=0), target, CHUNK)


@triton.jit
def _draw_filtered(
    row_ptr, values_ptr, ids_ptr, vocabulary, maxima, weights, max_logit, scale, top_k, top_p, min_p, uniform,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    total = tl.sum(weights * tl.exp2((maxima - max_logit) * scale), axis=0)
    bound = lower_bound(maxima, vocabulary, max_logit, total, scale, top_k, top_p, min_p, CHUNKS)
    count = gather(
        row_ptr, values_ptr, ids_ptr, ids_ptr + CAPACITY, vocabulary, maxima, bound, CHUNKS, CHUNK, CAPACITY
    )
    if count <= CAPACITY:
        token = draw_from_candidates(
            values_ptr, ids_ptr, count, vocabulary, max_logit, total, scale, top_k, top_p, min_p, uniform, CAPACITY
        )
    else:
        token = draw_from_row(
            row_ptr, vocabulary, bound, max_logit, total, scale, top_k, top_p, min_p, uniform, BLOCK
        )
    return token


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "uniform_ptr"])
def sample_kernel(
    logits_ptr,  # [num_rows, vocabulary]
    token_ptr,  # [num_rows] int64
    partials_ptr,  # [num_rows, 2, num_chunks]
    values_ptr,  # [num_rows, CAPACITY] float32 candidates, scratch
    ids_ptr,  # [num_rows, CAPACITY + CHUNKS] int32 ids and chunks, scratch
    temperature_ptr,  # [num_rows]
    top_k_ptr,  # [num_rows]
    top_p_ptr,  # [num_rows]
    min_p_ptr,  # [num_rows]
    uniform_ptr,  # [num_rows]
    logits_stride,
    vocabulary,
    num_chunks,
    greedy_temperature,
    SAMPLED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    # grid: [num_rows]
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    maxima_ptr = partials_ptr + row * 2 * num_chunks
    maxima, max_logit, usable = load_maxima(maxima_ptr, num_chunks, CHUNKS)
    token = _largest_token(row_ptr, vocabulary, maxima, max_logit, CHUNKS, CHUNK)
    if SAMPLED:
        temperature = tl.load(temperature_ptr + row)
        if usable & (temperature >= greedy_temperature):
            scale = LOG2_E / temperature
            top_k = tl.load(top_k_ptr + row)
            top_k = tl.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary)
            top_p = tl.load(top_p_ptr + row)
            min_p = tl.minimum(tl.load(min_p_ptr + row), 1.0)
            uniform = tl.load(uniform_ptr + row)
            chunk = tl.arange(0, CHUNKS)
            weights = tl.load(maxima_ptr + num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
            if (top_k < vocabulary) | (top_p < 1.0) | (min_p > 0.0):
                token = _draw_filtered(
                    row_ptr, values_ptr + row * CAPACITY, ids_ptr + row * (CAPACITY + CHUNKS), vocabulary, maxima,
                    weights, max_logit, scale, top_k, top_p, min_p, uniform, CHUNKS, CHUNK, BLOCK, CAPACITY,
                )  # fmt: skip
            else:
                token = _draw_from_chunk(
                    row_ptr, vocabulary, maxima, weights, max_logit, scale, uniform, CHUNKS, CHUNK
                )
    tl.store(token_ptr + row, tl.where(usable, token, -1).to(tl.int64))


def sample(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> torch.Tensor:
    """Return token ids [B] int64."""
    num_rows, vocabulary = logits.shape
    config = vocabulary_config(vocabulary)
    chunks = next_power_of_2(config.num_chunks)
    partials = torch.empty(num_rows, 2, config.num_chunks, dtype=torch.float32, device=logits.device)
    _launch_partials(logits, params, partials, config)
    capacity = config.capacity if params.any_sampled else 0
    values = torch.empty(num_rows, capacity, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, capacity + chunks, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sample_kernel[(num_rows,)](
        logits_ptr=logits,
        token_ptr=token_ids,
        partials_ptr=partials,
        values_ptr=values,
        ids_ptr=ids,
        temperature_ptr=params.temperature,
        top_k_ptr=params.top_k,
        top_p_ptr=params.top_p,
        min_p_ptr=params.min_p,
        uniform_ptr=uniform,
        logits_stride=logits.stride(0),
        vocabulary=vocabulary,
        num_chunks=config.num_chunks,
        greedy_temperature=GREEDY_TEMPERATURE,
        SAMPLED=params.any_sampled,
        CHUNKS=chunks,
        CHUNK=config.chunk,
        BLOCK=config.block,
        CAPACITY=capacity,
        num_warps=config.row_warps if params.any_sampled else config.num_warps,
    )
    return token_ids


def _launch_partials(
    logits: torch.Tensor, params: SamplingTensors, partials: torch.Tensor, config: VocabularyConfig
) -> None:
    num_rows, vocabulary = logits.shape
    programs = vocabulary_programs(num_rows, config.num_tiles, multiprocessors(logits.device))
    sample_partials_kernel[(num_rows, programs)](
        logits_ptr=logits,
        partials_ptr=partials,
        temperature_ptr=params.temperature,
        logits_stride=logits.stride(0),
        vocabulary=vocabulary,
        num_chunks=config.num_chunks,
        tiles_per_program=cdiv(config.num_tiles, programs),
        greedy_temperature=GREEDY_TEMPERATURE,
        SAMPLED=params.any_sampled,
        TILE=config.tile,
        CHUNK=config.chunk,
        num_warps=config.num_warps,
    )
