"""Processes of a model that several devices share, its ranks.

The engine's process is rank 0: it schedules, samples, and sends each step to the other ranks, which run the same
`ModelRunner` on their parts of the weights. No process outlives the group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from tidewheel.batch import RowError, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError, InternalError
from tidewheel.models.causal_lm import Progress
from tidewheel.models.shard import Shard
from tidewheel.runner.collectives import ProcessCollectives
from tidewheel.runner.device import cuda_obstacle
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.sampler import PendingStep
from tidewheel.runner.step_messages import decode_step, encode_step, without_rows
from tidewheel_process.child import Child

JOINS = b"\n"  # first byte from a rank, when it is about to join the group
HANG_S = 1.5  # longest wait for another rank inside a step
END_S = 0.3  # from a failed operation to the end of the rank that caused it
_LENGTH = struct.Struct("<I")


class RankProcess:
    """Process of a rank, and the reason of its end."""

    def __init__(self, rank: int, config: EngineConfig, rendezvous: Path) -> None:
        self.rank, self.failure = rank, ""
        self._connection, other = socket.socketpair()
        settings = msgspec.json.encode(config.to_settings()).decode()
        command = [sys.executable, "-P", "-m", "tidewheel.runner.rank_process", "--settings", settings]
        command += ["--rank", str(rank), "--rendezvous", str(rendezvous), "--socket", str(other.fileno())]
        with other:
            self._child = Child(command, ends_with_parent=True, pass_fds=[other.fileno()])
        self._ended = threading.Event()

    def wait_joining(self, timeout_s: float) -> None:
        """Wait until the process is about to join the group. Raise `ConfigError`."""
        self._connection.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError):
            self._connection.recv(len(JOINS))
        self._connection.settimeout(None)
        threading.Thread(target=self._watch, name=f"rank-{self.rank}", daemon=True).start()

    def _watch(self) -> None:
        reason = b""
        with contextlib.suppress(OSError):
            while part := self._connection.recv(4096):
                reason += part
        self._child.ends_within(END_S)
        self.failure = reason.decode(errors="replace") or f"rank {self.rank} ended with {self._child.exit}"
        self._ended.set()

    def send(self, message: bytes) -> None:
        self._connection.sendall(message)

    def ends_within(self, limit_s: float) -> bool:
        return self._ended.wait(limit_s)

    def end(self) -> None:
        self._child.kill()


class LeaderRunner(ModelRunner):
    """Runner of rank 0, which has the other ranks run each step too. A failure of any rank ends all."""

    send: Callable[[bytes], None] | None = None  # to the other ranks; None: at a load, all run the same
    failure: Callable[[float], str] = staticmethod(lambda _limit_s: "")  # of another rank, waited for so many seconds

    def check(self) -> None:
        """Raise `InternalError` if another rank has ended."""
        if reason := self.failure(0.0):
            raise InternalError(reason)

    def prepare(self, batch: ScheduledBatch) -> None:
        try:
            super().prepare(batch)
        except RowError:
            self._announce(without_rows(batch))  # the step is repeated without the row
            raise
        self._announce(batch)

    def _announce(self, batch: ScheduledBatch) -> None:
        if self.send is not None:
            self.send(encode_step(batch))

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        try:
            return super().launch(batch)
        except RowError:
            raise
        except Exception as error:  # short of memory too: the others are inside the step, which cannot be repeated
            if self.send is None:
                raise
            reason = self.failure(END_S) or f"rank 0 failed, or waited too long for another: {type(error).__name__}"
            raise InternalError(reason) from error


@torch.inference_mode()
def follow(runner: ModelRunner, receive: Callable[[], bytes | None]) -> None:
    """Run the leader's steps until `receive` returns None."""
    while (message := receive()) is not None:
        batch = decode_step(message)
        if len(batch.rows):
            runner.launch(batch)
        else:
            runner.prepare(batch)


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def receive_framed(connection: socket.socket) -> bytes | None:
    """Return the next message, None at the end."""
    header = _received(connection, _LENGTH.size)
    return _received(connection, *_LENGTH.unpack(header)) if header else None


def _received(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        if not (count := connection.recv_into(rest)):
            return None
        rest = rest[count:]
    return bytes(data)


def load_group(config: EngineConfig, progress: Progress | None) -> LeaderRunner:
    """Start the other ranks, and load this one's part. Raise `ConfigError`."""
    check_devices(config)
    ranks = range(1, config.tensor_parallel_size)
    with tempfile.TemporaryDirectory(prefix="tidewheel-ranks-") as folder:
        rendezvous = Path(folder) / "rendezvous"
        others = [RankProcess(rank, config, rendezvous) for rank in ranks]

        def failure(limit_s: float) -> str:
            if limit_s:
                any(rank.ends_within(limit_s) for rank in others)
            return next((rank.failure for rank in others if rank.failure), "")

        try:
            for rank in others:
                rank.wait_joining(config.engine_start_timeout_s)
            if any(rank.ends_within(0.0) for rank in others):
                raise ConfigError(failure(0.0))
            collectives = join_group(config, 0, rendezvous)
            runner = LeaderRunner.load(config, progress, Shard(0, config.tensor_parallel_size, collectives))
        except Exception as error:
            reason = "" if isinstance(error, ConfigError) else failure(END_S)
            for rank in others:
                rank.end()
            if reason:
                raise ConfigError(reason) from error
            raise
    collectives.limit(HANG_S)

    def send(message: bytes) -> None:
        data = framed(message)
        for rank in others:
            rank.send(data)

    runner.send, runner.failure = send, failure
    return runner


def join_group(config: EngineConfig, rank: int, rendezvous: Path) -> ProcessCollectives:
    """Take the rank's device, and wait for the other ranks there."""
    device = torch.device("cpu")
    if uses_gpus(config):
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    elif config.num_threads is None:
        torch.set_num_threads(max(num_cores() // config.tensor_parallel_size, 1))
    return ProcessCollectives(rendezvous, rank, config.tensor_parallel_size, device, config.engine_start_timeout_s)


def check_devices(config: EngineConfig) -> None:
    """Raise `ConfigError` if there are more ranks than GPUs, or than cores without GPUs."""
    count, kind = (torch.cuda.device_count(), "GPU") if uses_gpus(config) else (num_cores(), "core")
    if config.tensor_parallel_size > count:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}: each rank needs a {kind} of its own, and there "
            f"{'is' if count == 1 else 'are'} {count}; set it to at most {count}"
        )


def uses_gpus(config: EngineConfig) -> bool:
    return config.device != "cpu" and not cuda_obstacle()


def num_cores() -> int:
    return len(os.sched_getaffinity(0))
