"""Collectives between processes: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore

HOST = "127.0.0.1"


class ProcessCollectives:
    """Group of processes of one machine, which meet in a file. Operations raise `RuntimeError` if a rank is gone."""

    def __init__(self, rendezvous: Path, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        """Wait for all ranks. `timeout_s`: of this, and of each operation."""
        timeout, self._num_ranks = timedelta(seconds=timeout_s), num_ranks
        store = FileStore(str(rendezvous), num_ranks)
        store.set_timeout(timeout)
        self._group: Any
        if device.type == "cuda":
            options: Any = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = distributed.ProcessGroupNCCL(store, rank, num_ranks, options)
        else:
            gloo: Any = distributed.ProcessGroupGloo
            options = gloo._Options()
            options._timeout, options._devices = timeout, [gloo.create_device(hostname=HOST)]
            self._group = gloo(store, rank, num_ranks, options)

    def limit(self, timeout_s: float) -> None:
        """Set how long an operation waits for other ranks."""
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
