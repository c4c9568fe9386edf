"""An engine of two ranks, with a client, in which ranks fail as ordered; and what must be so after each fault."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import psutil

from support.engine.engine_clients import Client
from support.engine.faulty_engine import prompt_bytes
from support.faults import rank_faults
from support.faults.rank_faults import LOAD_POINTS, STEP_POINTS, SWAPPED, UNHEARD, Order
from support.models import tiny_models
from tidewheel.config import EngineConfig
from tidewheel.engine.messages import AddRequest
from tidewheel.sampling import SamplingParams
from tidewheel_process.child import ProcessHandle, RestartPolicy, wait_until

LIMIT_S = 120.0
SHARED_MEMORY = Path("/dev/shm")
COMMAND = (sys.executable, "-P", "-m", rank_faults.__name__)
RESTART = RestartPolicy(first_delay_s=0.01, max_delay_s=0.01, max_deaths=1 << 30)
PROMPTS = tiny_models.prompts(4, 20, 60, seed=3)
MAX_TOKENS = 150  # in all more than the blocks hold, so that some are swapped

ORDERS = [
    Order(rank, point, kind, num_passes=1 if point == SWAPPED else 3)
    for kind in ("kill", "stop", "memory")
    for point, ranks in {**STEP_POINTS, **dict.fromkeys(LOAD_POINTS, (0, 1))}.items()
    for rank in ranks
    if not (kind == "memory" and point == "inside a collective")  # the operation takes no memory of its own
    and not (kind == "stop" and point in LOAD_POINTS)  # the limit of a load is engine_start_timeout_s
]


class Left(NamedTuple):
    """What may stay after a fault."""

    files: frozenset[str]
    shared_memory: frozenset[str]
    num_descriptors: int
    num_threads: int


class RankedEngine:
    def __init__(self, client: Client, order: Path, temporary: Path) -> None:
        """`order`: path of orders; `temporary`: folder of the engine's temporary files."""
        self.client = client
        self._order = order
        self._temporary = temporary
        self._next_key = 0
        self._older = frozenset(SHARED_MEMORY.iterdir())
        self._expected = self._tokens(self._add())
        self._before = self._left()

    def check(self, order: Order) -> float:
        """Have a rank fail. Return the seconds after which its clients were told, 0 if they had not to be."""
        processes = self._processes()
        assert len(processes) == 2
        delay_s = 0.0
        if order.point in LOAD_POINTS:
            self._fail_in_load(order)
        elif order.kind == "stop" and order.rank == 0 and order.point in UNHEARD:
            self._pause(order)
            return 0.0
        else:
            delay_s = self._fail_in_step(order)
        for process in processes:
            with contextlib.closing(ProcessHandle(process.pid)) as handle:
                assert handle.wait(LIMIT_S), "a rank stays"
        assert self._tokens(self._add()) == self._expected, "other tokens after the return"
        assert set(self.client.recorder.num_endings.values()) == {1}
        assert wait_until(lambda: self._left() == self._before, LIMIT_S), f"{self._left()} is not {self._before}"
        return delay_s

    def _fail_in_load(self, order: Order) -> None:
        rank_faults.give(self._order, order)
        os.kill(self.client.info.pid, signal.SIGKILL)
        assert wait_until(rank_faults.fired_path(self._order).exists, LIMIT_S)

    def _fail_in_step(self, order: Order) -> float:
        recorder, keys = self.client.recorder, self._add_with(order)
        recorder.wait_ended(*keys, limit_s=LIMIT_S)
        delay_s = time.monotonic() - rank_faults.fired(self._order).at
        endings = [recorder.endings[key] for key in keys]
        assert "TW-ENGINE-DEAD" in endings
        for key, ending, expected in zip(keys, endings, self._expected, strict=True):
            tokens = recorder.tokens[key]
            assert tokens == (expected if ending == "length" else expected[: len(tokens)])
        return delay_s

    def _pause(self, order: Order) -> None:
        keys = self._add_with(order)
        assert wait_until(rank_faults.fired_path(self._order).exists, LIMIT_S)
        pid = rank_faults.fired(self._order).pid
        assert wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, LIMIT_S)
        os.kill(pid, signal.SIGCONT)
        assert self._tokens(keys) == self._expected

    def _processes(self) -> list[psutil.Process]:
        engine = psutil.Process(self.client.info.pid)
        return [engine, *engine.children(recursive=True)]

    def _add_with(self, order: Order) -> Sequence[int]:
        """Send requests, and order the fault when all have begun; that of a swap before, as there are few."""
        if order.point == SWAPPED:
            rank_faults.give(self._order, order)
            return self._add()
        keys = self._add()
        self.client.recorder.wait_started(*keys)
        rank_faults.give(self._order, order)
        return keys

    def _add(self) -> Sequence[int]:
        keys = range(self._next_key, self._next_key + len(PROMPTS))
        self._next_key += len(PROMPTS)
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        for key, prompt in zip(keys, PROMPTS, strict=True):
            self.client.add(AddRequest(key, prompt_bytes(*prompt.tolist()), sampling))
        return keys

    def _tokens(self, keys: Sequence[int]) -> list[list[int]]:
        self.client.recorder.wait_ended(*keys, limit_s=LIMIT_S)
        return [self.client.recorder.tokens[key] for key in keys]

    def _left(self) -> Left:
        process = psutil.Process()
        files = frozenset(path.name for path in self._temporary.iterdir())
        new = frozenset(SHARED_MEMORY.iterdir()) - self._older
        shared = frozenset(path.name for path in new if not path.name.startswith("tidewheel"))  # of other servers too
        return Left(files, shared, process.num_fds(), process.num_threads())


@contextlib.contextmanager
def ranked_engine(engine_dir: Path, folder: Path) -> Iterator[RankedEngine]:
    """Start an engine with a random model. `folder`: for model, orders and temporary files."""
    model, temporary, order = folder / "model", folder / "temporary", folder / "order"
    temporary.mkdir()
    tiny_models.save(tiny_models.llama, model)
    config = EngineConfig.from_settings(
        {
            "model": str(model), "dtype": "float32", "device": "cpu", "tensor_parallel_size": 2, "num_threads": 1,
            "num_blocks": 32, "block_size": 16, "swap_space": 0.01, "preemption_mode": "swap",
            "admit_by_growth": False,
        }
    )  # fmt: skip
    variables = {**rank_faults.variables(order), "TMPDIR": str(temporary)}
    with mock.patch.dict(os.environ, variables):
        client = Client(engine_dir, config=config, command=COMMAND, hold_s=LIMIT_S, restart=RESTART)
        try:
            client.start(LIMIT_S)
            yield RankedEngine(client, order, temporary)
        finally:
            client.close()
