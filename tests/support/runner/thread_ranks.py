"""Ranks of one model as threads of this process, with collectives in memory that record the order of calls."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch

from support.runner.step_loop import poison
from tidewheel.config import EngineConfig
from tidewheel.models.lora_folder import LoraWeights
from tidewheel.models.shard import Collectives, Shard
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.rank_group import LeaderRunner, follow
from tidewheel.runner.step_messages import LeaderLoras, serve_reads

WAIT_S = 60.0
Call = tuple[str, tuple[int, ...], torch.dtype]


class MemoryExchange:
    """Meeting point of ranks: each brings a tensor and sees those of all."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=WAIT_S)
        self._tensors: list[torch.Tensor | None] = [None] * num_ranks

    def all(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._tensors[rank] = x.clone()
        self._barrier.wait()
        tensors = [tensor for tensor in self._tensors if tensor is not None]
        self._barrier.wait()  # before any rank brings its next tensor
        return tensors

    def abort(self) -> None:
        self._barrier.abort()


_groups: dict[int, ThreadCollectives] = {}
_numbers = itertools.count()  # threads that make groups at once get different ones
# Operations of torch, which a recorded graph replays.
_library = torch.library.Library("thread_ranks", "DEF")
_library.define("all_reduce(Tensor(a!) x, int group) -> ()")
_library.define("all_gather(Tensor x, int group) -> Tensor")
_library.define("broadcast(Tensor(a!) x, int group) -> ()")
for name in ("all_reduce", "all_gather", "broadcast"):
    _library.impl(name, lambda x, group, name=name: getattr(_groups[group], f"run_{name}")(x), "CPU")


class ThreadCollectives(Collectives):
    def __init__(self, exchange: MemoryExchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank
        self.calls: list[Call] = []
        self._number = next(_numbers)
        _groups[self._number] = self

    def all_reduce(self, x: torch.Tensor) -> None:
        torch.ops.thread_ranks.all_reduce(x, self._number)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.thread_ranks.all_gather(x, self._number)

    def broadcast(self, x: torch.Tensor) -> None:
        torch.ops.thread_ranks.broadcast(x, self._number)

    def _all(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        self.calls.append((name, tuple(x.shape), x.dtype))
        return self._exchange.all(self._rank, x)

    def run_all_reduce(self, x: torch.Tensor) -> None:
        first, *others = self._all("all_reduce", x)
        total = first.clone()
        for other in others:
            total += other
        x.copy_(total)

    def run_all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all("all_gather", x))

    def run_broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._all("broadcast", x)[0])


class ThreadRanks:
    """A leader for this thread, and followers with threads of their own; use as a context manager."""

    def __init__(self, config: EngineConfig, num_ranks: int) -> None:
        config = dataclasses.replace(config, tensor_parallel_size=num_ranks)
        self.exchange = MemoryExchange(num_ranks)
        self.collectives = [ThreadCollectives(self.exchange, rank) for rank in range(num_ranks)]
        self.failures: list[BaseException] = []
        self.num_sent_bytes = 0
        with ThreadPoolExecutor(num_ranks) as pool:
            self.runners = list(pool.map(lambda rank: self._load(config, rank, num_ranks), range(num_ranks)))
        leader = self.runners[0]
        assert isinstance(leader, LeaderRunner)
        self.leader = leader
        self._queues: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in self.runners[1:]]
        leader.group = self
        self._pipes = [Pipe() for _ in self.runners[1:]]
        self.loras = LeaderLoras([own for own, _ in self._pipes])
        self.loras_of_followers: list[dict[int, LoraWeights]] = [{} for _ in self.runners[1:]]
        followers = list(zip(self.runners[1:], self._queues, self.loras_of_followers, strict=True))
        self._threads = [threading.Thread(target=self._follow, args=each, daemon=True) for each in followers]
        self._threads += [
            threading.Thread(target=self._serve_reads, args=(other, runner, loras), daemon=True)
            for (runner, _, loras), (_, other) in zip(followers, self._pipes, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _load(self, config: EngineConfig, rank: int, num_ranks: int) -> ModelRunner:
        kind = ModelRunner if rank else LeaderRunner
        try:
            return kind.load(config, shard=Shard(rank, num_ranks, self.collectives[rank]))
        except BaseException:
            self.exchange.abort()
            raise

    def failure(self, limit_s: float = 0.0) -> str:
        return "".join(map(repr, self.failures))

    def send(self, message: bytes) -> None:
        self.num_sent_bytes += len(message)
        for queue in self._queues:
            queue.put(message)

    def _follow(self, runner: ModelRunner, queue: SimpleQueue[bytes | None], loras: dict[int, LoraWeights]) -> None:
        try:
            follow(runner, queue.get, loras)
        except BaseException as error:
            self.failures.append(error)
            self.exchange.abort()

    def _serve_reads(self, pipe: Connection, runner: ModelRunner, loras: dict[int, LoraWeights]) -> None:
        serve_reads(pipe, lambda folder: runner.read_lora(folder), loras)  # as tests replace it

    def poison(self) -> None:
        for runner in self.runners:
            poison(runner)

    @property
    def calls(self) -> Sequence[Sequence[Call]]:
        return [collectives.calls for collectives in self.collectives]

    def __enter__(self) -> ThreadRanks:
        return self

    def kill(self) -> None:
        self.exchange.abort()

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        for own, _ in self._pipes:
            own.close()
        for thread in self._threads:
            thread.join(WAIT_S)

    def __exit__(self, *_: object) -> None:
        self.close()
        assert not self.failures
        assert all(calls == self.calls[0] for calls in self.calls), "ranks call collectives in different orders"
