"""Collectives between the processes of one machine: in shared memory on CPUs, by NCCL on GPUs."""

import ctypes
import fcntl
import functools
import itertools
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from mmap import mmap
from typing import Any, cast

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore, _register_process_group

from tidewheel.errors import ConfigError
from tidewheel.models.shard import Collectives

log = logging.getLogger(__name__)

PIECE = 1 << 20  # bytes of a rank that one exchange takes
SPIN_S = 30e-6  # longest wait without sleep: to be woken takes 15 us
SLICE_S = 0.02  # sleep between two looks at whether a rank is lost
_LINE = 64  # bytes of a semaphore and its padding
SYMMETRIC_SIZE = 2 << 20  # most elements of a sum: 4 MiB, the least of vLLM's SYMM_MEM_ALL_REDUCE_MAX_SIZES
_mappings = itertools.count(1)  # of this process: torch numbers them, and ranks must have the same number
# POSIX has semaphores order memory between processes. A call that cannot wait takes less time than giving up the GIL.
_waiting, _brief = ctypes.CDLL(None), ctypes.PyDLL(None)
_init, _post, _try_wait = _brief.sem_init, _brief.sem_post, _brief.sem_trywait
_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_post.argtypes = _try_wait.argtypes = [ctypes.c_void_p]


class RankLost(RuntimeError):
    """Error: another rank has ended, or does not answer."""


def create_memory(num_ranks: int) -> int:
    """Return a descriptor of memory without a name, for the `MemoryCollectives` of its heirs. Raise `ConfigError`."""
    if not hasattr(_waiting, "sem_clockwait"):
        raise ConfigError("several ranks on a CPU need glibc 2.30 or later: use one rank, or a newer system")
    file = os.memfd_create("tidewheel-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 2 * num_ranks * PIECE + num_ranks**2 * _LINE)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    for semaphore in torch.frombuffer(mmap(file, 0), dtype=torch.uint8)[2 * num_ranks * PIECE :: _LINE]:
        _init(semaphore.data_ptr(), True, 0)
    return file


def _split(x: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(x, PIECE // x.itemsize, dim=-1)


class MemoryCollectives(Collectives):
    """Group of ranks that exchange pieces of tensors in shared memory.

    For each piece, a rank writes its slot, posts to every other rank, and waits for their posts. Slots come in two
    sets, by turns: a rank that posts a piece has read the one before, whose slots the next piece may overwrite.
    """

    def __init__(
        self, memory: int, rank: int, num_ranks: int, timeout_s: float, lost: Callable[[], str] = lambda: ""
    ) -> None:
        """Use memory of `create_memory`, by descriptor. `lost` says why another rank has ended; empty: none has."""
        self._rank, self._limit_s, self._lost, self._turn = rank, timeout_s, lost, 0
        mapped = torch.frombuffer(mmap(memory, 0), dtype=torch.uint8)
        slots, semaphores = mapped.tensor_split([2 * num_ranks * PIECE])
        slots, semaphores = slots.view(2, num_ranks, PIECE), semaphores.view(num_ranks, num_ranks, _LINE)
        others = [other for other in range(num_ranks) if other != rank]
        self._posted = [semaphores[rank, other].data_ptr() for other in others]
        self._awaited = [(other, semaphores[other, rank].data_ptr()) for other in others]

        @functools.lru_cache(256)  # making views takes as long as a row's sum
        @torch.inference_mode(False)
        def views(turn: int, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
            return list(slots[turn].view(dtype)[:, :count])

        self._num_ranks, self._views = num_ranks, views

    def limit(self, timeout_s: float) -> None:
        """Set how long an operation waits for another rank before it raises `RankLost`."""
        self._limit_s = timeout_s

    def all_reduce(self, x: torch.Tensor) -> None:
        """Add in the order of ranks, so that all have the same bits."""
        for piece, (first, second, *others) in self._exchanged(x.view(-1)):
            torch.add(first, second, out=piece)
            for other in others:
                piece.add_(other)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self._num_ranks, x.numel())
        for pieces, (_, slots) in zip(_split(gathered), self._exchanged(x.flatten()), strict=True):
            torch.stack(slots, out=pieces)
        return gathered.view(self._num_ranks, *x.shape)

    def broadcast(self, x: torch.Tensor) -> None:
        for piece, slots in self._exchanged(x.view(-1)):
            piece.copy_(slots[0])

    def _exchanged(self, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Yield each piece of a vector with those of all ranks, which the second next call replaces."""
        for piece in _split(x):
            self._turn ^= 1
            slots = self._views(self._turn, x.dtype, len(piece))
            slots[self._rank].copy_(piece)
            for semaphore in self._posted:
                _post(semaphore)
            for rank, semaphore in self._awaited:
                if _try_wait(semaphore):
                    self._wait(rank, semaphore)
            yield piece, slots

    def _wait(self, rank: int, semaphore: int) -> None:
        began = time.monotonic()
        while _try_wait(semaphore):
            now = time.monotonic()
            until = struct.pack("ll", *divmod(int(1e9 * (now + SLICE_S)), 10**9))  # a C timespec
            if now - began < SPIN_S:
                os.sched_yield()  # the other rank may wait for this processor
            elif not _waiting.sem_clockwait(ctypes.c_void_p(semaphore), time.CLOCK_MONOTONIC, until):
                return
            elif (reason := self._lost()) or now - began > self._limit_s:
                raise RankLost(reason or f"rank {rank} did not answer for {self._limit_s:g} s")


class NcclCollectives(Collectives):
    """Group of processes, each on a GPU. Operations raise `RuntimeError` if a rank is gone."""

    def __init__(self, memory: int, rank: int, num_ranks: int, timeout_s: float) -> None:
        """Wait for all ranks, which meet in an empty file. `timeout_s`: of this, and of each operation."""
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # else other machines can reach the sockets of its start
        timeout, self._rank, self._num_ranks = timedelta(seconds=timeout_s), rank, num_ranks
        path = f"/proc/self/fd/{os.dup(memory)}"  # NCCL may open it later too: it stays open
        self._store = FileStore(path, num_ranks)
        self._store.set_timeout(timeout)
        options: Any = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._group: Any = distributed.ProcessGroupNCCL(self._store, rank, num_ranks, options)

    def limit(self, timeout_s: float) -> None:
        self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def all_reduce(self, x: torch.Tensor) -> None:
        self._group.allreduce([x]).wait()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self._num_ranks * len(x), *x.shape[1:])
        if x.numel():
            self._group._allgather_base(gathered, x.contiguous()).wait()
        return gathered.view(self._num_ranks, *x.shape)

    def broadcast(self, x: torch.Tensor) -> None:
        self._group.broadcast([x]).wait()


class SymmetricCollectives(NcclCollectives):
    """GPUs of one NVLink switch that sum small bfloat16 tensors in torch's symmetric memory: buffers all ranks map.

    One rank adds an element's parts and writes the sum to all: the same bits. A sum waits for ranks without a limit.
    Without a switch all sums are NCCL's: over PCIe, ranks can map memory, and wait in it for each other for ever.
    """

    def __init__(self, memory: int, rank: int, num_ranks: int, timeout_s: float, device: str = "cuda") -> None:
        super().__init__(memory, rank, num_ranks, timeout_s)
        self._buffer = torch.empty(0, dtype=torch.bfloat16, device=device)
        operation, level, reason = 0, logging.INFO, "another rank cannot map memory, or has for another group"
        if self._agree(next(_mappings)):
            self._store.set_timeout(timedelta(seconds=30))  # for a rank that has failed
            try:
                operation = self._map()
            except Exception as error:  # of any kind: other ranks wait for this one's value
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._store.set_timeout(timedelta(seconds=timeout_s))
        if self._agree(operation):
            if self._agree(self._compare()):
                log.info("sums of up to %d bytes by %s, others by NCCL", self._buffer.nbytes, self._add.__name__)
                return
            level, reason = logging.WARNING, "sums in symmetric memory are not NCCL's, or not the same on all ranks"
        self._buffer = self._buffer[:0]
        log.log(level, "all sums by NCCL: %s", reason)

    def _agree(self, value: int) -> bool:
        values = self.all_gather(torch.tensor([value], device=self._buffer.device))
        return value > 0 and bool((values == value).all())

    def _map(self) -> int:
        """Map a buffer of each rank, at addresses that graphs can hold. Return 1, or 2 if sums are by multicast."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._members = distributed.ProcessGroup(self._store, self._rank, self._num_ranks)
        self._name = cast(Any, os.urandom(8).hex())
        _register_process_group(self._name, self._members)  # keeps no reference
        self._buffer = symmetric_memory.empty(SYMMETRIC_SIZE, dtype=torch.bfloat16, device=self._buffer.device)
        if symmetric_memory.rendezvous(self._buffer, self._name).multicast_ptr == 0:
            raise RuntimeError("no NVLink switch with multicast joins the GPUs")
        least = 4 if torch.cuda.get_device_capability() < (10, 0) else 6  # ranks, as in vLLM
        uses_multicast = self._num_ranks >= least
        self._add = getattr(torch.ops.symm_mem, "multimem_all_reduce_" if uses_multicast else "two_shot_all_reduce_")
        return 1 + uses_multicast

    def _compare(self) -> bool:
        """Return whether sums are NCCL's but for rounding, and the same on all ranks."""
        ours = torch.linspace(1, 2 + self._rank, len(self._buffer), dtype=torch.bfloat16, device=self._buffer.device)
        theirs = ours.clone()
        self.all_reduce(ours)
        super().all_reduce(theirs)
        are_equal = bool((self.all_gather(ours) == ours).all())
        return are_equal and torch.allclose(ours, theirs, rtol=self._num_ranks * torch.finfo(ours.dtype).eps, atol=0)

    def all_reduce(self, x: torch.Tensor) -> None:
        if x.dtype == torch.bfloat16 and 0 < x.numel() <= len(self._buffer) and x.nbytes % 16 == 0:
            x.view(-1).copy_(self._add(self._buffer[: x.numel()].copy_(x.view(-1)), "sum", self._name))
        else:
            super().all_reduce(x)
