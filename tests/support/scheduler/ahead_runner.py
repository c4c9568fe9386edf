"""An engine on a modelled clock: a device that runs queued steps, a host that works between them, known answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from support.scheduler.scheduling import make_request, make_scheduler
from tidewheel.batch import Int32Array, RowArray, SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.engine.core import EngineCore
from tidewheel.scheduler.goodput import Goodput
from tidewheel.scheduler.speculation import Proposals, Proposer

FloatArray = npt.NDArray[np.float64]
Table = Sequence[tuple[int, float]]  # entries of a step and its seconds on the device
MOST = 8  # drafts of a row
LAUNCH_S, APPLY_S = 0.3e-3, 0.3e-3  # of the host for each step


def seconds_of(table: Table, num_entries: int) -> float:
    sizes, seconds = np.log(table).T
    return math.exp(np.interp(math.log(num_entries), sizes, seconds))


def answer(rows: RowArray, positions: Int32Array) -> Int32Array:
    return (positions + 7 * rows).astype(np.int32)


class ModelledClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class QueuedStep(NamedTuple):
    clock: ModelledClock
    sampled: SampledTokens
    ends_at: float
    is_done: None = None

    def wait(self) -> SampledTokens:
        self.clock.now = max(self.clock.now, self.ends_at)
        return self.sampled


class QueueingRunner:
    """Runner whose launches return before the device has run them."""

    def __init__(self, clock: ModelledClock, table: Table) -> None:
        self._clock = clock
        self._table = table
        self._free_at = 0.0

    def launch(self, batch: ScheduledBatch) -> QueuedStep:
        self._clock.now += LAUNCH_S
        self._free_at = max(self._free_at, self._clock.now) + seconds_of(self._table, batch.num_tokens)
        tokens = answer(batch.rows, batch.start_positions + batch.num_scheduled_tokens)
        return QueuedStep(self._clock, SampledTokens(batch.step_id, tokens), self._free_at)


class ChanceDrafts:
    """Proposer of the next tokens, each right with a chance. A row has proposals with the chance `found` [rows]."""

    is_free = True

    def __init__(self, right: float, found: Sequence[float], seed: int) -> None:
        self._num_tokens = np.zeros(len(found), dtype=np.int32)
        self._right, self._found = right, np.array(found)
        self._random = np.random.default_rng(seed)

    def enter(self, row: int, token_ids: Int32Array) -> None:
        self._num_tokens[row] = len(token_ids)

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        self._num_tokens += np.bincount(rows, minlength=len(self._num_tokens)).astype(np.int32)

    def propose(self, rows: RowArray) -> Proposals:
        drafts = answer(rows[:, None], self._num_tokens[rows, None] + np.arange(MOST, dtype=np.int32))
        drafts += self._random.random(drafts.shape) >= self._right
        counts = np.where(self._random.random(len(rows)) < self._found[rows], MOST, 0).astype(np.int32)
        return Proposals(counts, drafts, np.zeros(len(rows), dtype=np.int32))


class ModelledEngine:
    """An engine of `num_rows` rows, without drafts if there is no proposer."""

    def __init__(
        self,
        table: Table,
        num_rows: int,
        proposer: Proposer | ChanceDrafts | None = None,
        *,
        runner: Callable[[ModelledClock, Table], QueueingRunner] = QueueingRunner,
        **settings: object,
    ) -> None:
        self.clock, self._num_rows, self._num_requests = ModelledClock(), num_rows, 0
        self.scheduler = make_scheduler(
            num_blocks=64 * num_rows, block_size=16, max_num_seqs=num_rows, max_model_len=1024,
            enable_prefix_caching=False, num_speculative_tokens=MOST,
            speculation="none" if proposer is None else "prompt_lookup",
            decode_seconds=[(size, seconds_of(table, size) + LAUNCH_S) for size in (1, 2, 4, 8, 16, 32, 64, 128)],
            **{"max_num_batched_tokens": 8192, "max_inflight_steps": 2} | settings,
        )  # fmt: skip
        if proposer is not None:
            self.scheduler.use_proposer(proposer)
        self._core = EngineCore(self.scheduler, runner(self.clock, table), self._deliver, clock=self.clock)
        self._arrivals: dict[str, list[float]] = {}

    @property
    def goodput(self) -> Goodput:
        speculation = self.scheduler._state.speculation
        assert speculation is not None
        return speculation._goodput

    def _deliver(self, outputs: StepOutputs) -> None:
        self.clock.now += APPLY_S
        for request in outputs.requests:
            self._arrivals[request.request_id].append(self.clock.now)

    def add(self, num_tokens: int, prompt: int = 16, **fields: object) -> None:
        self._num_requests += 1
        self._arrivals[name := str(self._num_requests)] = []
        self._core.add_group([make_request(name, prompt, max_tokens=num_tokens, **fields)])

    def step(self) -> None:
        self._core.step()

    def run(self, num_tokens: int, prompt: int = 16) -> FloatArray:
        """Run a request in each row. Return the seconds until each token of each request [rows, num_tokens]."""
        began, self._arrivals = self.clock.now, {}
        for _ in range(self._num_rows):
            self.add(num_tokens, prompt)
        while self._core.has_unfinished:
            self.step()
        return np.array(list(self._arrivals.values())) - began
