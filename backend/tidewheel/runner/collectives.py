"""Collectives between processes: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore

from tidewheel.errors import ConfigError

HOST = "127.0.0.1"
CONNECTIONS = Path("/proc/self/net/tcp")
_ESTABLISHED, _LISTENS = "01", "0A"


class ProcessCollectives:
    """Group of processes of one machine, which meet in a file. Operations raise `RuntimeError` if a rank is gone."""

    def __init__(self, rendezvous: Path, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
        """Wait for all ranks. Raise `ConfigError` if a process of another user is among them.

        `timeout_s`: of this, and of each operation.
        """
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
            before = own_sockets()
            options = gloo._Options()
            options._timeout, options._devices = timeout, [gloo.create_device(hostname=HOST)]
            self._group = gloo(store, rank, num_ranks, options)
            check_peers(own_sockets() - before)

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


def own_sockets() -> set[str]:
    """Return the inodes of this process's sockets."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed by now
            inodes.update(re.findall(r"^socket:\[(\d+)\]$", str(link.readlink())))
    return inodes


def check_peers(inodes: Collection[str]) -> None:
    """Raise `ConfigError` if these sockets accepted a connection from a process of another user.

    gloo takes any connection to its port as that of a rank, and every user of the machine can reach the loopback.
    """
    try:
        rows = [line.split() for line in CONNECTIONS.read_text(encoding="ascii").splitlines()[1:]]
    except OSError as error:
        raise ConfigError(
            f"{CONNECTIONS}, which tells whose processes the ranks are, cannot be read: {error}"
        ) from None
    sockets = [(row[3], row[1], row[2], row[7], row[9]) for row in rows]
    ports = {local for state, local, _, _, inode in sockets if state == _LISTENS and inode in inodes}
    users = {(local, remote): user for _, local, remote, user, _ in sockets}
    for state, local, remote, user, _ in sockets:
        if state == _ESTABLISHED and local in ports and users.get((remote, local)) != user:
            raise ConfigError("a process of another user took the place of a rank: end it, and start again")
