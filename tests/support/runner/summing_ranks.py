"""Processes on GPUs that sum tensors as ranks do, eagerly and in graphs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import torch

from tidewheel.config import EngineConfig
from tidewheel.runner.accelerator import CudaAccelerator
from tidewheel.runner.collectives import SYMMETRIC_SIZE, NcclCollectives, SymmetricCollectives
from tidewheel.runner.rank_group import join_group

COUNTS = (8, 4096, 128 * 4096, SYMMETRIC_SIZE, SYMMETRIC_SIZE + 8)  # elements
REPLAYS, TIMED = 50, 100
Sum = Callable[[torch.Tensor], None]


class SumReport(NamedTuple):
    operation: str  # empty: all sums are by NCCL
    faults: Sequence[str]
    times_us: Sequence[tuple[int, float, float]]  # bytes, a sum, NCCL's


class SummingRank:
    """One rank, on its GPU."""

    def __init__(self, group: SymmetricCollectives, rank: int, num_ranks: int) -> None:
        self._group, self._rank, self._num_ranks = group, rank, num_ranks
        self._device = torch.device("cuda", rank)
        self._generator = torch.Generator(self._device).manual_seed(rank)
        self._pool = CudaAccelerator(self._device).graph_pool()
        self.by_nccl: Sum = partial(NcclCollectives.all_reduce, group)

    def draw(self, count: int) -> torch.Tensor:
        return torch.randn(count, dtype=torch.bfloat16, device=self._device, generator=self._generator)

    def fault(self, given: torch.Tensor, total: torch.Tensor) -> str:
        """Return what is wrong with a sum of what ranks gave; empty: nothing."""
        parts = self._group.all_gather(given).double()
        bound = self._num_ranks * torch.finfo(given.dtype).eps * parts.abs().sum(0)
        if not ((total.double() - parts.sum(0)).abs() <= bound).all():
            return f"a sum of {len(given)} elements is wrong"
        totals = self._group.all_gather(total)
        return "" if bool((totals == total).all()) else f"ranks have other sums of {len(given)} elements"

    def faults_of_graphs(self) -> list[str]:
        """Replay a graph of sums of all sizes, with eager sums between, and check each."""
        inputs = [self.draw(count) for count in COUNTS]
        outputs = [torch.empty_like(x) for x in inputs]

        def sums() -> None:
            for x, output in zip(inputs, outputs, strict=True):
                self._group.all_reduce(output.copy_(x))

        graph, faults = self._pool.capture(sums).graph, []
        for _ in range(REPLAYS):
            for x in inputs:
                x.copy_(self.draw(len(x)))
            graph.replay()
            faults += [self.fault(x, output) for x, output in zip(inputs, outputs, strict=True)]
            faults += [self.fault_of_eager(64)]
        return faults

    def fault_of_eager(self, count: int) -> str:
        given = self.draw(count)
        total = given.clone()
        self._group.all_reduce(total)
        return self.fault(given, total)

    def time_us(self, way: Sum, count: int) -> float:
        """Return the time of a sum in a graph of many."""
        x = torch.zeros(count, dtype=torch.bfloat16, device=self._device)
        graph = self._pool.capture(lambda: [way(x) for _ in range(TIMED)]).graph
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        return 1e3 * began.elapsed_time(ended) / TIMED


def run_rank(num_ranks: int, memory: str, rank: int) -> SumReport:
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(message)s")
    config = EngineConfig(model="any", device="cuda", tensor_parallel_size=num_ranks)
    group = join_group(config, rank, os.open(memory, os.O_RDWR))
    assert isinstance(group, SymmetricCollectives)
    summing = SummingRank(group, rank, num_ranks)
    faults = [*(summing.fault_of_eager(count) for count in COUNTS), *summing.faults_of_graphs()]
    times = [(2 * n, summing.time_us(group.all_reduce, n), summing.time_us(summing.by_nccl, n)) for n in COUNTS]
    operation = group._add.__name__ if len(group._buffer) else ""
    return SumReport(operation, [fault for fault in faults if fault], times)


def run_ranks(num_ranks: int) -> list[SumReport]:
    """Run each rank in a process of its own."""
    memory = os.memfd_create("ranks")
    path = f"/proc/{os.getpid()}/fd/{memory}"
    try:
        with ProcessPoolExecutor(num_ranks, get_context("spawn")) as pool:
            return list(pool.map(partial(run_rank, num_ranks, path), range(num_ranks)))
    finally:
        os.close(memory)
