"""Sums in symmetric memory on CPUs, with doubles of NCCL and of torch's symmetric memory, which has no CPU form."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import _symmetric_memory as symmetric_memory

from support.runner.thread_ranks import Call, MemoryExchange
from tidewheel.runner import collectives
from tidewheel.runner.collectives import SymmetricCollectives

LIMIT_S, SIZE = 20.0, 1 << 12
MULTICAST, TWO_SHOT = "multimem_all_reduce_", "two_shot_all_reduce_"
NO_SWITCH = "RuntimeError: no NVLink switch with multicast joins the GPUs"
OTHERS = "another rank cannot map memory, or has for another group"
WRONG = "sums in symmetric memory are not NCCL's, or not the same on all ranks"


class Work:
    def wait(self) -> None: ...


class Machine:
    """GPUs in this process's memory, a thread each. It records what ranks call, and what they map."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.exchange = num_ranks, MemoryExchange(num_ranks)
        self.capability, self.multicast_ptrs = (9, 0), [1] * num_ranks
        self.failure: tuple[int, Exception] | None = None  # rank that cannot map memory
        self.change: Callable[[int, torch.Tensor], object] = lambda rank, total: None  # of a rank's sum
        self.buffers: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(num_ranks)}
        self.by_nccl: list[list[Call]] = [[] for _ in range(num_ranks)]
        self.by_memory: list[list[tuple[str, int]]] = [[] for _ in range(num_ranks)]

    def group(self, store: Any, rank: int, num_ranks: int, options: Any) -> NcclDouble:
        return NcclDouble(self, rank)

    def total(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange.all(rank, x)).sum(0, dtype=torch.float64).to(x.dtype)

    def rendezvous(self, buffer: torch.Tensor, name: str) -> Any:
        rank = _resolve_process_group(name).rank()
        self.buffers[rank].append(buffer)
        if self.failure is not None:
            raise self.failure[1] if self.failure[0] == rank else RuntimeError("Timeout waiting for key")
        return type("Handle", (), {"multicast_ptr": self.multicast_ptrs[rank]})

    def add(self, operation: str, shared: torch.Tensor, reduce_op: str, name: str) -> torch.Tensor:
        rank = _resolve_process_group(name).rank()
        assert reduce_op == "sum" and shared.data_ptr() == self.buffers[rank][0].data_ptr()
        self.by_memory[rank].append((operation, shared.numel()))
        shared.copy_(self.total(rank, shared))
        self.change(rank, shared)
        return shared

    def join(self) -> list[SymmetricCollectives]:
        memory = os.memfd_create("ranks")
        ranks = range(self.num_ranks)
        with ThreadPoolExecutor(self.num_ranks) as pool:
            joined = pool.map(lambda rank: SymmetricCollectives(memory, rank, self.num_ranks, LIMIT_S, "cpu"), ranks)
        os.close(memory)
        return list(joined)

    def sums(self, groups: list[SymmetricCollectives], given: list[torch.Tensor]) -> list[torch.Tensor]:
        def run(rank: int) -> torch.Tensor:
            x = given[rank].clone()
            groups[rank].all_reduce(x)
            return x

        with ThreadPoolExecutor(self.num_ranks) as pool:
            return list(pool.map(run, range(self.num_ranks)))


class NcclDouble:
    """NCCL's group, which records calls."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self._machine, self._rank = machine, rank

    def _record(self, name: str, x: torch.Tensor) -> None:
        self._machine.by_nccl[self._rank].append((name, tuple(x.shape), x.dtype))

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        self._record("all_reduce", tensors[0])
        tensors[0].copy_(self._machine.total(self._rank, tensors[0]))
        return Work()

    def _allgather_base(self, gathered: torch.Tensor, x: torch.Tensor) -> Work:
        self._record("all_gather", x)
        gathered.copy_(torch.cat(self._machine.exchange.all(self._rank, x)))
        return Work()


@pytest.fixture
def num_ranks() -> int:
    return 2


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> Iterator[Machine]:
    double = Machine(num_ranks)
    nccl = type("Nccl", (), {"Options": type("Options", (), {}), "__new__": lambda _, *given: double.group(*given)})
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(collectives, "_mappings", itertools.repeat(1))
    monkeypatch.setattr(collectives, "SYMMETRIC_SIZE", SIZE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: double.capability)
    monkeypatch.setattr(symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", double.rendezvous)
    library = torch.library.Library("symm_mem", "IMPL")
    for name in (MULTICAST, TWO_SHOT):
        library.impl(name, lambda *given, name=name: double.add(name, *given), "CPU")
    yield double
    library._destroy()


def drawn(count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    return (100 * torch.randn(count, generator=torch.Generator().manual_seed(rank))).to(dtype)


@pytest.mark.parametrize(
    ("capability", "num_ranks", "operation"),
    [((9, 0), 2, TWO_SHOT), ((9, 0), 4, MULTICAST), ((10, 0), 4, TWO_SHOT), ((10, 3), 6, MULTICAST)],
)
def test_the_operation_is_that_of_the_hardware_on_all_ranks(
    machine: Machine, capability: tuple[int, int], num_ranks: int, operation: str
) -> None:
    machine.capability = capability
    given = [drawn(64, torch.bfloat16, rank) for rank in range(num_ranks)]
    found = machine.sums(machine.join(), given)
    assert machine.by_memory == [[(operation, SIZE), (operation, 64)]] * num_ranks
    expected = torch.stack(given).double().sum(0).bfloat16()
    assert all(torch.equal(total, expected) for total in found)


@pytest.mark.parametrize(
    ("count", "dtype", "is_in_memory"),
    [
        (8, torch.bfloat16, True),
        (SIZE, torch.bfloat16, True),
        (SIZE + 8, torch.bfloat16, False),
        (0, torch.bfloat16, False),
        (12, torch.bfloat16, False),
        (8, torch.float16, False),
        (8, torch.float32, False),
        (8, torch.int64, False),
    ],
)
def test_small_bfloat16_sums_are_in_memory_and_others_by_nccl(
    machine: Machine, count: int, dtype: torch.dtype, is_in_memory: bool
) -> None:
    groups, given = machine.join(), [drawn(count, dtype, rank) for rank in range(2)]
    before = len(machine.by_nccl[0])
    found = machine.sums(groups, given)
    assert [calls[1:] for calls in machine.by_memory] == [[(TWO_SHOT, count)] if is_in_memory else []] * 2
    assert [calls[before:] for calls in machine.by_nccl] == [
        [] if is_in_memory else [("all_reduce", (count,), dtype)]
    ] * 2
    assert all(torch.equal(total, (given[0].double() + given[1].double()).to(dtype)) for total in found)


def test_one_buffer_of_bounded_size_serves_all_sums(machine: Machine) -> None:
    groups = machine.join()
    for count in (8, SIZE, 64, 8):
        machine.sums(groups, [drawn(count, torch.bfloat16, rank).view(2, -1) for rank in range(2)])
    assert [[buffer.nbytes for buffer in buffers] for buffers in machine.buffers.values()] == [[2 * SIZE]] * 2
    assert machine.by_memory[0] == [(TWO_SHOT, count) for count in (SIZE, 8, SIZE, 64, 8)] == machine.by_memory[1]


def without_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed, "_symmetric_memory")
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", None)


def without_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("no memory\nC++ frames")

    monkeypatch.setattr(symmetric_memory, "empty", empty)


def without_peers(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.failure = 1, RuntimeError("peer access is not supported\nC++ frames")


def without_a_switch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.multicast_ptrs = [0] * 4


def with_some_multicast(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.multicast_ptrs = [1, 0, 1, 1]


def with_other_mappings(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_mappings", itertools.count(1))


def with_wrong_sums(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.change = lambda rank, total: total.sub_(1)


def with_other_bits(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.change = lambda rank, total: total[7:8].view(torch.int16).add_(rank == 1)


@pytest.mark.parametrize("num_ranks", [4])
@pytest.mark.parametrize(
    ("fault", "reasons"),
    [
        (
            without_torch,
            {"ModuleNotFoundError: import of torch.distributed._symmetric_memory halted; None in sys.modules"},
        ),
        (without_memory, {"OutOfMemoryError: no memory"}),
        (without_peers, {"RuntimeError: peer access is not supported", "RuntimeError: Timeout waiting for key"}),
        (without_a_switch, {NO_SWITCH}),
        (with_some_multicast, {NO_SWITCH, OTHERS}),
        (with_other_mappings, {OTHERS}),
        (with_wrong_sums, {WRONG}),
        (with_other_bits, {WRONG}),
    ],
)
def test_all_ranks_sum_by_nccl_if_one_rank_cannot_or_its_sums_differ(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    fault: Callable[[Machine, pytest.MonkeyPatch], None], reasons: set[str],
) -> None:  # fmt: skip
    fault(machine, monkeypatch)
    with caplog.at_level(logging.INFO, "tidewheel.runner.collectives"):
        groups = machine.join()
    assert len(caplog.messages) == 4
    assert set(caplog.messages) == {f"all sums by NCCL: {reason}" for reason in reasons}
    in_trial = [len(calls) for calls in machine.by_memory]
    found = machine.sums(groups, [torch.full((8,), 2.0**rank, dtype=torch.bfloat16) for rank in range(4)])
    assert all(total.tolist() == [15.0] * 8 for total in found)
    assert [len(calls) for calls in machine.by_memory] == in_trial
    assert all(calls == machine.by_nccl[0] for calls in machine.by_nccl)


def test_the_log_says_which_sums_are_in_memory(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tidewheel.runner.collectives"):
        machine.join()
    assert caplog.messages == [f"sums of up to {2 * SIZE} bytes by {TWO_SHOT}, others by NCCL"] * 2
    assert machine.by_nccl[0] == machine.by_nccl[1]
