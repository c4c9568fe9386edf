"""Processes of a model that several devices share, its ranks.

The engine's process is rank 0: it schedules, samples, and sends each step to the other ranks, which run the same
`ModelRunner` on their parts of the weights, each in a process of this module. No process outlives the group.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from tidewheel.batch import RowError, ScheduledBatch
from tidewheel.confidential import log_to_stderr, protect_texts
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError, InternalError
from tidewheel.models.causal_lm import Progress
from tidewheel.models.lora_folder import LoraWeights
from tidewheel.models.shard import Collectives, Shard
from tidewheel.runner.collectives import MemoryCollectives, RankLost, SymmetricCollectives, create_memory
from tidewheel.runner.device import check_ranks_fit, num_cores, uses_gpus
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.sampler import PendingStep
from tidewheel.runner.step_messages import LeaderLoras, decode_step, encode_step, serve_reads, without_rows
from tidewheel_process.child import Child
from tidewheel_process.current_process import end_with_parent

log = logging.getLogger(__name__)

HANG_S = 1.5  # longest wait for another rank inside a step
GPU_HANG_S = 60.0  # longest time of an operation on a GPU, with the steps that are queued before it
END_S = 0.1  # from a failed operation to the end of the rank that caused it
AFTER_RANK_S = 1.5  # time that an engine has to end by itself after another rank ended
LEADER_HANG_S = HANG_S + 0.15  # rank 0 may itself wait for a rank that hangs, and tells its clients
USED_S = 0.02  # processor time of a process that computes
GAP_S = 0.5  # between two calls of `LeaderWatch`, at least: between two waits


class RankStart(msgspec.Struct):
    """Argument of a rank's process."""

    rank: int
    settings: dict[str, Any]
    memory: int  # descriptor, as are the next
    steps: int  # of a connection
    loras: int  # of a connection for adapters
    ends_engine: bool  # if rank 0 hangs


class RankProcess:
    """Process of a rank, and the reason of its end."""

    def __init__(
        self, rank: int, config: EngineConfig, memory: int, ended: threading.Event, *, is_engine: bool
    ) -> None:
        """Start the process, and set `ended` at its end. Raise OSError."""
        self.rank, self.failure, self._ended = rank, "", ended
        self.joining = threading.Event()  # the process is about to join the group, or has ended
        (self.steps, steps), (self.loras, loras) = Pipe(), Pipe()
        limit = struct.pack("ll", *divmod(int(1e6 * hang_limit_s(config)), 10**6))  # a C timeval
        with socket.socket(fileno=os.dup(self.steps.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        start = RankStart(rank, config.to_settings(), memory, steps.fileno(), loras.fileno(), is_engine)
        command = [sys.executable, "-P", "-m", __name__, msgspec.json.encode(start).decode()]
        started: Future[Child] = Future()
        threading.Thread(
            target=self._run, args=(command, memory, steps, loras, started), name=f"rank-{rank}", daemon=True
        ).start()
        self.child = started.result()  # raises what starting raised

    def _run(
        self, command: Sequence[str], memory: int, steps: Connection, loras: Connection, started: Future[Child]
    ) -> None:
        """Start the process, and wait for its end here: the kernel ends a child with the thread that started it."""
        reason = ""
        with self.steps, self.loras:
            try:
                with steps, loras:
                    child = Child(command, ends_with_parent=True, pass_fds=[memory, steps.fileno(), loras.fileno()])
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(child)
            with contextlib.suppress(OSError, EOFError):
                self.steps.recv_bytes()  # empty
                self.joining.set()
                reason = self.steps.recv_bytes().decode()
        child.ends_within(END_S)
        self.failure = reason or f"rank {self.rank} ended with {child.exit}, and the log may say why"
        self._ended.set()
        self.joining.set()


class RankGroup:
    """Processes of ranks 1 and up."""

    def __init__(self, config: EngineConfig, memory: int, *, is_engine: bool) -> None:
        """Start them, and wait until they are about to join the group. Raise `ConfigError`."""
        self._ended, self._closing = threading.Event(), threading.Event()
        self._processes: list[RankProcess] = []
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            for rank in range(1, config.tensor_parallel_size):
                try:
                    self._processes.append(RankProcess(rank, config, memory, self._ended, is_engine=is_engine))
                except OSError as error:
                    raise ConfigError(f"the process of rank {rank} cannot be started: {error}") from error
            for process in self._processes:
                process.joining.wait()
            if reason := self.failure():
                raise ConfigError(reason)
            failed.pop_all()
        self.loras = LeaderLoras([process.loras for process in self._processes])
        if is_engine:
            threading.Thread(target=self._end_engine, name="ranks", daemon=True).start()

    def _end_engine(self) -> None:
        """End this process soon after another rank ended: it may wait for ever in an operation with that rank."""
        reason = self.failure(None)
        if not self._closing.wait(AFTER_RANK_S):
            log.error("engine died: %s", reason)
            os._exit(1)

    def send(self, message: bytes) -> None:
        """Raise OSError if a process has ended, or takes nothing for as long as an operation may wait."""
        for process in self._processes:
            process.steps.send_bytes(message)

    def failure(self, limit_s: float | None = 0.0) -> str:
        """Wait up to `limit_s` for the end of a rank (None: for ever). Return its reason; empty: none has ended."""
        if not self._ended.wait(limit_s):
            return ""
        return next(process.failure for process in self._processes if process.failure)

    @property
    def pids(self) -> list[int]:
        return [process.child.pid for process in self._processes]

    def kill(self) -> None:
        """Send the signal that ends the processes, without waiting for their ends."""
        for process in self._processes:
            process.child.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End the processes."""
        self._closing.set()
        self.kill()
        for process in self._processes:
            process.child.wait()


class LeaderRunner(ModelRunner):
    """Runner of rank 0, which also sends each step to the other ranks. A failure of any rank ends all."""

    group: RankGroup | None = None  # None during the load, in which no step is sent to the others

    @property
    def ranks(self) -> list[tuple[int, str]]:
        """Return the process id and device of each rank."""
        pids, device = [os.getpid(), *(self.group.pids if self.group is not None else ())], self.kv.device.type
        return [(pid, device if device == "cpu" else f"{device}:{rank}") for rank, pid in enumerate(pids)]

    def check(self) -> None:
        """Raise `InternalError` if another rank has ended."""
        if self.group is not None and (reason := self.group.failure()):
            raise InternalError(reason)

    def close(self) -> None:
        """End the other ranks."""
        if self.group is not None:
            self.group.close()

    def prepare(self, batch: ScheduledBatch) -> None:
        try:
            super().prepare(batch)
        except RowError:
            self._announce(without_rows(batch))  # the step is repeated without the row
            raise
        self._announce(batch)

    def _announce(self, batch: ScheduledBatch) -> None:
        if self.group is not None:
            self.group.send(encode_step(batch, self.group.loras))

    def read_lora(self, folder: Path) -> LoraWeights:
        """Read an adapter on all ranks, for one caller at a time. Raise `ConfigError`."""
        assert self.group is not None
        return self.group.loras.read(folder, super().read_lora)

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        try:
            return super().launch(batch)
        except BaseException as error:  # short of memory, or Ctrl-C: the others are inside a step that cannot go on
            if self.group is None or isinstance(error, RowError):
                raise
            reason = f"rank 0 failed, or another did not answer: {type(error).__name__}"
            failure = self.group.failure(END_S) or (str(error) if isinstance(error, RankLost) else reason)
            self.group.kill()
            if isinstance(error, Exception):
                raise InternalError(failure) from error
            raise


def load_group(config: EngineConfig, progress: Progress | None) -> LeaderRunner:
    """Start the other ranks, and load this one's part. Raise `ConfigError`.

    `progress`: of an engine's process; None in another program, which outlives a failed group.
    """
    check_ranks_fit(config)
    file = os.memfd_create("tidewheel-ranks") if uses_gpus(config) else create_memory(config.tensor_parallel_size)
    with os.fdopen(file, "wb"):
        group = RankGroup(config, file, is_engine=progress is not None)
        try:
            collectives = join_group(config, 0, file, group.failure)
            runner = LeaderRunner.load(config, progress, Shard(0, config.tensor_parallel_size, collectives))
        except BaseException as error:
            reason = "" if isinstance(error, ConfigError) else group.failure(END_S)
            group.close()
            if reason:
                raise ConfigError(reason) from error
            raise
    collectives.limit(hang_limit_s(config))
    runner.group = group
    return runner


def hang_limit_s(config: EngineConfig) -> float:
    """Return how long rank 0 waits for another inside a step, in seconds."""
    return GPU_HANG_S if uses_gpus(config) else HANG_S


def join_group(config: EngineConfig, rank: int, memory: int, lost: Callable[[], str] = lambda: "") -> Collectives:
    """Take the rank's device, and join the other ranks there. `lost` says why one has ended."""
    num_ranks, limit_s = config.tensor_parallel_size, config.engine_start_timeout_s
    if uses_gpus(config):
        torch.cuda.set_device(torch.device("cuda", rank))
        return SymmetricCollectives(memory, rank, num_ranks, limit_s)
    if config.num_threads is None:
        torch.set_num_threads(max(num_cores() // num_ranks, 1))
    return MemoryCollectives(memory, rank, num_ranks, limit_s, lost)


class LeaderWatch:
    """Killer of an engine that hangs: its process uses no processor time while this rank waits for it."""

    is_armed = False  # a load may wait for a disk

    def __init__(self) -> None:
        self._leader = os.getppid()  # with which this process ends
        self._clock = ~self._leader << 3 | 2  # of the process's processor time, see clock_getcpuclockid(3)
        self._called_at = self._since = self._used_s = 0.0

    def __call__(self) -> str:
        """Look at the engine. Call it again and again in a wait."""
        now, used_s = time.monotonic(), time.clock_gettime(self._clock)
        if now - self._called_at > GAP_S or used_s - self._used_s > USED_S:
            self._since, self._used_s = now, used_s
        self._called_at = now
        if self.is_armed and now - self._since > LEADER_HANG_S:
            log.error("engine died: rank 0 hangs in a step")
            os.kill(self._leader, signal.SIGKILL)
        return ""


@torch.inference_mode()
def follow(
    runner: ModelRunner, next_message: Callable[[], bytes | None], loras: MutableMapping[int, LoraWeights]
) -> None:
    """Run the steps of rank 0 until `next_message` returns None. `loras`: adapters that were read, by number."""
    while (message := next_message()) is not None:
        batch = decode_step(message, loras)
        if len(batch.rows):
            runner.launch(batch)
        else:
            runner.prepare(batch)


def run(start: RankStart, connection: Connection) -> str:
    """Run the rank until the engine ends. Return the reason of an end before that."""
    try:
        connection.send_bytes(b"")  # it is about to join the group
        config, rank = EngineConfig.from_settings(start.settings), start.rank
        watch = LeaderWatch()
        shard = Shard(rank, config.tensor_parallel_size, join_group(config, rank, start.memory, watch))
        runner = ModelRunner.load(config, shard=shard)
        watch.is_armed = start.ends_engine
        gc.collect()
        gc.freeze()  # a collection of what loading made takes 0.1 s, for which all ranks would wait
        loras: dict[int, LoraWeights] = {}
        if config.enable_lora:
            serving = partial(serve_reads, Connection(start.loras), runner.read_lora, loras)
            threading.Thread(target=serving, name="loras", daemon=True).start()
        with contextlib.suppress(EOFError):
            follow(runner, connection.recv_bytes, loras)
    except ConfigError as error:
        return str(error)
    except Exception as error:
        log.exception("the rank failed")
        return f"rank {start.rank} failed: {type(error).__name__}; its traceback is in the log"
    return ""


def main() -> None:
    start = msgspec.json.decode(sys.argv[1], type=RankStart)
    end_with_parent(signal.SIGKILL)  # a stopped process takes no other signal
    for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 decides when all end: a service manager signals all
        signal.signal(number, signal.SIG_IGN)
    protect_texts()
    log_to_stderr(logging.INFO, f"%(asctime)s %(levelname)s rank {start.rank}: %(message)s")
    faulthandler.enable()
    with Connection(start.steps) as connection:
        reason = run(start, connection)
        with contextlib.suppress(OSError):
            connection.send_bytes(reason.encode())
    os._exit(bool(reason))  # without the interpreter's clean-up, which can hang on a failed device


if __name__ == "__main__":
    main()
