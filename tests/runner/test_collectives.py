"""Collectives in shared memory give all ranks equal bits, name a rank that is missing, and admit no other process."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tidewheel.errors import ConfigError
from tidewheel.models.shard import Collectives
from tidewheel.runner import collectives
from tidewheel.runner.collectives import PIECE, MemoryCollectives, NcclCollectives, create_memory

LIMIT_S = 20.0
SHAPES = [(1, 576), (16, 576), (3,), (0, 8), (2, 3, 5), (PIECE // 4, 2), (PIECE // 2 + 7,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32]


@pytest.fixture
def memory(num_ranks: int) -> Iterator[int]:
    file = create_memory(num_ranks)
    yield file
    os.close(file)


def on_all_ranks(memory: int, num_ranks: int, function: Callable[[Collectives, int], Any]) -> list[Any]:
    """Run a function on a thread for each rank, and return the results."""
    ranks = [MemoryCollectives(memory, rank, num_ranks, LIMIT_S) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(function, ranks, range(num_ranks)))


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (100 * drawn).to(dtype)


def check_operation(group: Collectives, rank: int, num_ranks: int, name: str, seed: int) -> None:
    shape, dtype = SHAPES[seed % len(SHAPES)], DTYPES[seed % len(DTYPES)]
    given = [tensor(shape, dtype, seed + other) for other in range(num_ranks)]
    x = given[rank].clone()
    if name == "gather":
        assert torch.equal(group.all_gather(x.t().contiguous().t() if x.dim() == 2 else x), torch.stack(given))
        return
    getattr(group, name)(x)
    expected = given[0].clone()
    for other in given[1:] if name == "all_reduce" else ():
        expected += other
    assert torch.equal(x, expected)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_operations_of_ranks_that_are_late(memory: int, num_ranks: int) -> None:
    def run(group: Collectives, rank: int) -> None:
        common, own = random.Random(num_ranks), random.Random(rank)
        for _ in range(100):
            name, seed = common.choice(["all_reduce", "gather", "broadcast"]), common.randrange(35)
            if own.random() < 0.2:
                time.sleep(own.random() / 500)
            check_operation(group, rank, num_ranks, name, seed)

    on_all_ranks(memory, num_ranks, run)


@pytest.mark.parametrize("num_ranks", [2])
def test_operations_inside_and_outside_inference_mode_share_memory(memory: int, num_ranks: int) -> None:
    def run(group: Collectives, rank: int) -> list[float]:
        with torch.inference_mode():
            for _ in range(2):
                group.all_reduce(torch.ones(3))
        x = torch.ones(3)
        group.all_reduce(x)
        return x.tolist()

    assert on_all_ranks(memory, num_ranks, run) == [[2.0] * 3] * 2


@pytest.mark.parametrize("num_ranks", [3])
def test_a_rank_that_does_not_come_is_named(memory: int, num_ranks: int) -> None:
    def run(group: MemoryCollectives, rank: int) -> str:
        group.all_reduce(torch.ones(3))
        if rank == 1:
            return ""
        group.limit(2.0)
        with pytest.raises(RuntimeError) as error:
            group.all_reduce(torch.ones(3))
        return str(error.value)

    message = "rank 1 did not answer for 2 s"
    assert on_all_ranks(memory, num_ranks, run) == [message, "", message]


@pytest.mark.parametrize("num_ranks", [2])
def test_a_wait_ends_when_a_rank_is_lost(memory: int, num_ranks: int) -> None:
    answers = iter(["", "rank 1 ended with signal 9"])
    group = MemoryCollectives(memory, 0, num_ranks, LIMIT_S, partial(next, answers))
    with pytest.raises(RuntimeError, match="rank 1 ended with signal 9"):
        group.broadcast(torch.ones(1))


@pytest.mark.parametrize("num_ranks", [2])
def test_the_memory_keeps_its_size(memory: int, num_ranks: int) -> None:
    """A rank that reads beyond the end of a file is killed by SIGBUS."""
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def opened_by_child(path: str, **options: Any) -> str:
    """Return why a new process cannot open a file, empty if it can."""
    done = subprocess.run(
        ["/bin/sh", "-c", ': <> "$0"', path], capture_output=True, check=False, text=True, **options
    )
    return done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(("num_ranks", "user", "reason"), [(2, 0, ""), (2, 65534, "Permission denied")])
def test_the_memory_is_refused_to_another_user(memory: int, num_ranks: int, user: int, reason: str) -> None:
    answer = opened_by_child(f"/proc/{os.getpid()}/fd/{memory}", user=user)
    assert reason in answer
    assert bool(reason) == bool(answer)


@pytest.mark.parametrize("num_ranks", [2])
def test_the_memory_has_no_name_and_no_chance_heir(memory: int, num_ranks: int) -> None:
    path = f"/proc/self/fd/{memory}"
    assert str(Path(path).readlink()).endswith(" (deleted)")
    answer = opened_by_child(path, close_fds=False)
    assert "No such file" in answer or "nonexistent" in answer


class StoreOfRanks:
    """NCCL's group, as far as it meets the other ranks."""

    Options = staticmethod(type("Options", (), {}))

    def __init__(self, store: Any, rank: int, num_ranks: int, options: Any) -> None:
        store.set(f"id-{rank}", str(rank))
        self.seen = [store.get(f"id-{other}") for other in range(num_ranks)]


@pytest.mark.parametrize(("given", "used"), [(None, "lo"), ("eth1", "eth1")])
def test_ranks_on_gpus_meet_in_a_file_without_a_name_and_on_the_loopback(
    monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", StoreOfRanks, raising=False)
    memory = os.memfd_create("ranks")
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: NcclCollectives(memory, rank, 2, LIMIT_S), range(2)))
    os.close(memory)
    assert [group._group.seen for group in groups] == [[b"0", b"1"]] * 2
    assert os.environ["NCCL_SOCKET_IFNAME"] == used


def test_an_old_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_waiting", object())
    with pytest.raises(ConfigError, match=r"need glibc 2\.30"):
        create_memory(2)
