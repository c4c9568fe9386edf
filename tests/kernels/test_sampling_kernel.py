"""What is particular to the sampling kernels: chunks, programs that share a row, candidates that may overflow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch

from support.kernels.interpreted_runs import fewer, slow_interpreted
from support.kernels.sampling_rows import CHUNK, GREEDY, Row, kept_weights, little_room, possible_draws, tensors
from tidewheel_kernels.launch_config import vocabulary_config
from tidewheel_kernels.sampling import triton_kernels as kernels
from tidewheel_kernels.sampling.reference import sample_reference

INF, NAN = float("inf"), float("nan")
FILTERS = [Row(), Row(0.7, top_k=20, top_p=0.95), Row(0.6, top_p=0.9), Row(1.5, min_p=0.05), Row(1.0, top_k=3000)]
ROWS = [*FILTERS, GREEDY, Row(2.0, top_p=0.99, min_p=0.001), Row(1.0, top_k=4, min_p=0.3)]


@contextmanager
def programs_per_row(number: int) -> Iterator[None]:
    with mock.patch.object(kernels, "vocabulary_programs", lambda rows, tiles, sms: min(number, tiles)):
        yield


def rows_of_logits(num_rows: int, vocabulary: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def uniforms(number: int, seed: int) -> torch.Tensor:
    return torch.rand(number, generator=torch.Generator().manual_seed(seed))


def assert_possible(logits: torch.Tensor, rows: list[Row], uniform: torch.Tensor, got: torch.Tensor) -> None:
    for values, row, u, token in zip(logits.cpu(), rows, uniform.tolist(), got.tolist(), strict=True):
        assert token in possible_draws(values, row, u), (row, u)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 33, CHUNK, CHUNK + 1, 4096, *slow_interpreted([20_011])])
def test_any_vocabulary_and_dtype(device: str, vocabulary: int, dtype: torch.dtype) -> None:
    logits = rows_of_logits(len(ROWS), vocabulary, vocabulary).to(dtype)
    uniform = uniforms(len(ROWS), vocabulary)
    got = kernels.sample(logits.to(device), tensors(ROWS, device), uniform.to(device)).cpu()
    assert_possible(logits, ROWS, uniform, got)


@pytest.mark.parametrize("vocabulary", [700, 9000])
def test_candidates_and_passes_agree(device: str, vocabulary: int) -> None:
    logits = rows_of_logits(len(ROWS), vocabulary, 5, spread=1.0)
    for seed in range(fewer(1, 3)):
        uniform = uniforms(len(ROWS), seed)
        args = logits.to(device), tensors(ROWS, device), uniform.to(device)
        with little_room():
            in_passes = kernels.sample(*args).cpu()
        assert_possible(logits, ROWS, uniform, in_passes)
        assert_possible(logits, ROWS, uniform, kernels.sample(*args).cpu())


def test_a_draw_does_not_depend_on_the_batch_or_on_how_many_programs_share_a_row(device: str) -> None:
    num_rows, vocabulary = 3 * len(ROWS), 3000
    logits = rows_of_logits(num_rows, vocabulary, 11).to(device)
    rows = (ROWS * num_rows)[:num_rows]
    uniform = uniforms(num_rows, 11).to(device)
    together = kernels.sample(logits, tensors(rows, device), uniform)
    with programs_per_row(2):
        assert torch.equal(kernels.sample(logits, tensors(rows, device), uniform), together)
    for i in range(0, num_rows, 3):
        for number in (1, 3):
            with programs_per_row(number):
                alone = kernels.sample(logits[i : i + 1], tensors(rows[i : i + 1], device), uniform[i : i + 1])
            assert alone.item() == together[i].item()


def test_partial_results_are_the_same_bits_for_any_number_of_programs(device: str) -> None:
    logits = rows_of_logits(3, 5000, 2).to(device)
    config = vocabulary_config(5000)
    partials = []
    for number in (1, 2, config.num_tiles):
        partials.append(torch.full((3, 2, config.num_chunks), NAN, device=device))
        with programs_per_row(number):
            kernels._launch_partials(logits, tensors([Row(0.3)] * 3, device), partials[-1], config)
    assert not partials[0].isnan().any()
    assert torch.equal(partials[0], partials[1]) and torch.equal(partials[0], partials[2])


def test_a_greedy_row_is_the_same_in_a_batch_that_samples(device: str) -> None:
    logits = rows_of_logits(6, 2000, 4).to(device)
    logits[0], logits[1, 1999], logits[2, 7], logits[3] = 1.0, NAN, INF, -INF
    uniform = torch.full((6,), 0.5, device=device)
    greedy = kernels.sample(logits, tensors([GREEDY] * 6, device), uniform)
    mixed = kernels.sample(logits, tensors([GREEDY] * 5 + [Row()], device), uniform)
    assert torch.equal(greedy[:5], mixed[:5])
    assert greedy[:4].tolist() == [0, -1, -1, -1]


@pytest.mark.parametrize("row", [*FILTERS, GREEDY], ids=str)
def test_unusable_rows_wherever_the_value_stands(device: str, row: Row) -> None:
    vocabulary = 3 * CHUNK
    places = [0, CHUNK - 1, CHUNK, vocabulary - 1]
    logits = rows_of_logits(2 * len(places) + 1, vocabulary, 6)
    for i, place in enumerate(places):
        logits[i, place], logits[len(places) + i, place] = NAN, INF
    params = tensors([row] * len(logits), device)
    got = kernels.sample(logits.to(device), params, torch.full((len(logits),), 0.5, device=device)).tolist()
    assert got[:-1] == [-1] * 2 * len(places) and 0 <= got[-1] < vocabulary


def test_ties_across_chunks(device: str) -> None:
    logits = torch.full((1, 4 * CHUNK), -1.0)
    ties = [CHUNK + 5, 2 * CHUNK, 4 * CHUNK - 1]
    logits[0, ties] = 2.0
    for row in (Row(top_k=2), Row(0.01, top_p=0.5), Row(min_p=0.9)):
        drawn = {
            kernels.sample(logits.to(device), tensors([row], device), torch.tensor([u], device=device)).item()
            for u in (0.1, 0.5, 0.9)
        }
        assert drawn == set(ties)


def test_a_row_of_equals_overflows_the_candidates(device: str) -> None:
    vocabulary = 2 * vocabulary_config(10**6).capacity
    logits = torch.zeros(3, vocabulary, device=device)
    uniform = torch.tensor([0.0, 0.5, 0.75], device=device)
    for row in (Row(top_k=5), Row(min_p=0.5), Row()):
        got = kernels.sample(logits, tensors([row] * 3, device), uniform).tolist()
        assert got == [0, vocabulary // 2, vocabulary * 3 // 4]


@pytest.mark.parametrize("masked", [-INF, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_masked_tokens_and_whole_masked_chunks(device: str, row: Row, masked: float) -> None:
    vocabulary = 6 * CHUNK
    logits = torch.full((4, vocabulary), masked)
    allowed = [3, CHUNK * 2 + 9, CHUNK * 5 + 100]
    logits[:, allowed] = torch.tensor([1.0, 2.0, 1.5])
    uniform = torch.tensor([0.0, 0.3, 0.6, 1 - 2.0**-24])
    rows = [row] * 4
    got = kernels.sample(logits.to(device), tensors(rows, device), uniform.to(device)).cpu()
    assert set(got.tolist()) <= set(allowed)
    assert_possible(logits, rows, uniform, got)


def test_parameters_at_their_ends(device: str) -> None:
    logits = rows_of_logits(1, 2000, 9)
    best = int(logits.argmax())
    for row in (Row(top_p=0.0), Row(min_p=1.0), Row(top_k=1), Row(1e-5), Row(1e4, top_p=1e-6)):
        for u in (0.0, 1 - 2.0**-24):
            got = kernels.sample(logits.to(device), tensors([row], device), torch.tensor([u], device=device))
            assert got.item() == best, row
    for row in (Row(1e8), Row(top_p=1 - 2.0**-24), Row(top_k=1999), Row(min_p=1e-38)):
        uniform = torch.tensor([0.5])
        got = kernels.sample(logits.to(device), tensors([row], device), uniform.to(device))
        assert_possible(logits, [row], uniform, got)


# Critical values of the chi-square distribution at 0.1 %, by degrees of freedom (any statistical table).
CHI_SQUARE = {2: 13.82, 4: 18.47, 5: 20.52}


@pytest.mark.parametrize(
    "row_and_kept",
    [(Row(1.0, min_p=0.3), 5), *slow_interpreted([(Row(0.9), 6), (Row(1.2, top_k=3), 3), (Row(1.0, top_p=0.93), 5)])],
    ids=str,
)
def test_draws_follow_the_distribution(device: str, row_and_kept: tuple[Row, int]) -> None:
    """Pearson's test with a fixed seed, on tokens that stand in different chunks."""
    row, kept = row_and_kept
    places = [0, 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK]
    logits = torch.full((1, 2 * CHUNK + 1), -INF)
    logits[0, places] = torch.tensor([0.4, 0.3, 0.15, 0.2, 0.1, 0.4]).log()
    draws = 100
    args = logits.expand(draws, -1).contiguous().to(device), tensors([row] * draws, device)
    got = kernels.sample(*args, uniforms(draws, 17).to(device)).cpu()
    weights = kept_weights(logits[0].double().numpy(), row, row.top_p)
    chosen = weights > 0
    assert chosen.sum() == kept
    expected = draws * weights[chosen] / weights.sum()
    observed = np.bincount(got.numpy(), minlength=len(weights))
    assert observed[~chosen].sum() == 0
    assert ((observed[chosen] - expected) ** 2 / expected).sum() < CHI_SQUARE[kept - 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 32, 256])
def test_whole_vocabularies_on_a_gpu(device: str, num_rows: int, dtype: torch.dtype) -> None:
    logits = rows_of_logits(num_rows, 151_936, num_rows).to(dtype)
    rows = (ROWS * num_rows)[:num_rows]
    uniform = uniforms(num_rows, 1)
    got = kernels.sample(logits.to(device), tensors(rows, device), uniform.to(device)).cpu()
    assert_possible(logits, rows, uniform, got)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_in_a_cuda_graph_and_without_waiting(device: str) -> None:
    logits = rows_of_logits(len(ROWS), 151_936, 3).to(device)
    params, uniform = tensors(ROWS, device), uniforms(len(ROWS), 3).to(device)
    kernels.sample(logits, params, uniform)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = kernels.sample(logits, params, uniform)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(3):
        logits.copy_(rows_of_logits(len(ROWS), 151_936, 20 + seed))
        uniform.copy_(uniforms(len(ROWS), seed))
        graph.replay()
        assert torch.equal(captured, kernels.sample(logits, params, uniform))
        assert torch.equal(captured[5].cpu(), sample_reference(logits, params, uniform)[5].cpu())
