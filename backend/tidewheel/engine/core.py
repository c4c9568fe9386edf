import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np

from tidewheel.batch import (
    NO_DRAFT,
    NO_TRANSFERS,
    NOT_DRAFTED,
    BoolArray,
    Int32Array,
    RowError,
    SampledTokens,
    ScheduledBatch,
    StepOutputs,
    no_ids,
)
from tidewheel.engine.shared_device import UnsharedDevice
from tidewheel.errors import InternalError, TidewheelError
from tidewheel.request import FinishReason, Request
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.stats import EngineStats

log = logging.getLogger(__name__)

MAX_GIVEN_UP = 3  # requests of one step

T = TypeVar("T")
Deliver = Callable[[StepOutputs], None]


class PendingTokens(Protocol):
    @property
    def is_done(self) -> bool | None: ...  # None: unknown; else the core does not wait for it

    def wait(self) -> SampledTokens: ...


class Runner(Protocol):
    """Interface of `tidewheel.runner.model_runner.ModelRunner`."""

    def launch(self, batch: ScheduledBatch) -> PendingTokens: ...


class _StepInFlight(NamedTuple):
    batch: ScheduledBatch
    pending: PendingTokens
    scheduled_at: float


class _Failure(NamedTuple):
    error: Exception
    is_done: bool = True

    def wait(self) -> NoReturn:
        raise self.error


@dataclass(eq=False)
class EngineCore:
    """Loop that schedules steps and runs them, on one thread.

    With two steps in flight, the device computes one while the other's tokens are applied. `receive`, called before
    scheduling and before applying tokens, may call `add_group` and `cancel`. `deliver` gets new tokens, and each
    request's end once; it may call `cancel`.
    """

    scheduler: Scheduler
    runner: Runner
    deliver: Deliver
    _: KW_ONLY
    receive: Callable[[], None] = lambda: None
    beat: Callable[[float], None] = lambda _: None  # called before each launch with the seconds to its next call
    first_step_s: float = 0.0  # what `beat` gets while step times cannot be predicted
    arbiter: UnsharedDevice = field(default_factory=UnsharedDevice)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._expected_s = 0.0
        self._in_flight: deque[_StepInFlight] = deque()
        self._step_seconds = 0.0
        self._last_end = self.clock()
        self._last_stats = (self.clock(), 0.0)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_unfinished

    def add_group(self, requests: Sequence[Request]) -> None:
        """Add all sequences of one prompt, or none."""
        self._deliver_ended(self.scheduler.add_group(requests, self.clock()))

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request in any state; ignore unknown ids."""
        request = self.scheduler.cancel(request_id, reason)
        if request is not None:
            self._deliver_ended([request])

    def finish(self, request_id: str, error: TidewheelError | None) -> None:
        """End a request that ran elsewhere; ignore unknown ids."""
        reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
        request = self.scheduler.cancel(request_id, reason, error)
        if request is not None:
            request.first_token_time = self.clock()
            self.deliver(StepOutputs([request], np.zeros(1, np.int32), None, [request]))

    def fail_all(self, error: TidewheelError) -> None:
        self._in_flight.clear()
        self._deliver_ended(self.scheduler.fail_all(error))

    def step(self) -> bool:
        """Run a step. Return False if there was nothing to do, or another engine has its turn on the device."""
        self.receive()
        now = self.clock()
        self._deliver_ended(self.scheduler.expire(now))
        has_turn, batch = self.arbiter.take(self.scheduler.best_class), None
        if has_turn and (batch := self.scheduler.schedule(now, self.arbiter.slice_s)) is not None:
            self._launch(batch, now)
        worked = batch is not None
        for _ in range(self._num_to_complete(batch) if self._in_flight else 0):
            self._complete()
            worked = True
        if not self._in_flight:
            self.arbiter.give_back(ran=worked)
        return worked

    def stats(self) -> EngineStats:
        """Return a snapshot; `busy_fraction` counts since the last snapshot."""
        now = self.clock()
        (then, busy), self._last_stats = self._last_stats, (now, self._step_seconds)
        stats = self.scheduler.stats()
        stats.step_seconds, stats.turn_wait_seconds = self._step_seconds, self.arbiter.waited_s
        stats.oldest_wait_by_class = self.scheduler.oldest_waits(now)
        stats.busy_fraction = min(1.0, (self._step_seconds - busy) / max(now - then, 1e-9))
        return stats

    def _launch(self, batch: ScheduledBatch, now: float) -> None:
        before = self._expected_s
        predicted = self.scheduler.step_time.longest_seconds(batch.num_tokens - batch.num_decodes)
        self._expected_s = self.first_step_s if predicted is None else predicted
        self.beat(before + self._expected_s)
        self._in_flight.append(_StepInFlight(batch, _attempt(lambda: self.runner.launch(batch)), now))

    @property
    def _has_failed_launch(self) -> bool:
        return bool(self._in_flight) and isinstance(self._in_flight[-1].pending, _Failure)

    def _num_to_complete(self, batch: ScheduledBatch | None) -> int:
        """Return how many steps to wait for. After a failed launch, all: a further step would read its tokens."""
        if self._has_failed_launch:
            return len(self._in_flight)
        is_due = batch is None or len(self._in_flight) == self.scheduler.max_inflight_steps
        return int(is_due if (is_done := self._in_flight[0].pending.is_done) is None else is_done)

    def _complete(self) -> None:
        batch, pending, scheduled_at = self._in_flight.popleft()
        result = _attempt(pending.wait)
        del pending  # a retry needs its room
        tokens = self._recover(batch, result.error) if isinstance(result, _Failure) else result
        if not self._has_failed_launch:  # it is repeated with what it loads, which what is received may drop
            self.receive()
        self.deliver(self.scheduler.apply(batch, tokens, self.clock()))
        end = self.clock()
        # Of two steps in flight, the second begins when the first ends.
        self._step_seconds += end - max(scheduled_at, self._last_end)
        self._last_end = end

    def _recover(self, batch: ScheduledBatch, error: Exception) -> SampledTokens:
        """Rerun a failed step with fewer rows. If a later step is in flight, it read the tokens: end the requests."""
        if not self._in_flight:
            has_drafts = len(batch.draft_tokens) > 0 and not isinstance(error, RowError)
            return self._run_without_drafts(batch, error) if has_drafts else self._run_rest(batch, error)
        left = set(self._in_flight[0].batch.freed_rows.tolist())
        for row in batch.rows.tolist():
            if row not in left:
                self._give_up(row, error)
        return _no_tokens(batch)

    def _run_without_drafts(self, batch: ScheduledBatch, error: Exception) -> SampledTokens:
        """Rerun, without its drafts, a step that ran out of memory: drafts take some of it."""
        log.warning("a step runs again without its drafts: %s", error)
        keep = batch.draft_tokens == NO_DRAFT
        plain = _only(batch, keep)
        result = _attempt(lambda: self.runner.launch(plain).wait())
        tokens = self._run_rest(plain, result.error) if isinstance(result, _Failure) else result
        draft_tokens = np.where(keep, np.int32(NO_DRAFT), np.int32(NOT_DRAFTED))
        return replace(_spread(keep, tokens), draft_tokens=draft_tokens)

    def _run_rest(self, batch: ScheduledBatch, error: Exception) -> SampledTokens:
        """Rerun a failed step without the failed row, or, short of memory, without the longest chunk.

        A repeated step writes the same keys and values.
        """
        keep = np.ones(len(batch.rows), dtype=np.bool_)
        for _ in range(MAX_GIVEN_UP):
            is_culprit = batch.rows == error.row if isinstance(error, RowError) else keep * batch.num_scheduled_tokens
            culprit = int(np.argmax(is_culprit))
            keep[batch.rows == batch.rows[culprit]] = False  # a row with drafts repeats
            self._give_up(int(batch.rows[culprit]), error)
            if not keep.any():
                self.scheduler.loras.discard_loads(batch.lora_loads)
                return _no_tokens(batch)
            result = _attempt(lambda: self.runner.launch(_only(batch, keep)).wait())
            if not isinstance(result, _Failure):
                return _spread(keep, result)
            error = result.error
        raise error

    def _give_up(self, row: int, error: Exception) -> None:
        log.error("a request is given up: %s", error, exc_info=error)
        for request in [one for one in self.scheduler.unfinished() if one.row == row]:
            self.scheduler.cancel(request.request_id, FinishReason.ERROR)
            request.error = InternalError(
                "the sampling of this request failed; the server's log says why"
                if isinstance(error, RowError)
                else f"the device ran out of memory at {request.num_tokens} tokens of this request: send a shorter "
                "one, or lower max_num_batched_tokens or gpu_memory_utilization"
            )
            self._deliver_ended([request])

    def _deliver_ended(self, requests: list[Request]) -> None:
        if requests:
            self.deliver(StepOutputs([], no_ids(), None, requests))


def _attempt(work: Callable[[], T]) -> T | _Failure:
    try:
        return work()
    except Exception as error:
        if not isinstance(error, RowError) and not _is_out_of_memory(error):
            raise
        return _Failure(error.with_traceback(None))  # its frames hold tensors


def _is_out_of_memory(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def _no_tokens(batch: ScheduledBatch) -> SampledTokens:
    return SampledTokens(batch.step_id, np.full(len(batch.rows), SampledTokens.NOT_FINITE, dtype=np.int32))


def _only(batch: ScheduledBatch, keep: BoolArray) -> ScheduledBatch:
    """Return a batch of some rows, without block copies: the blocks may hold other data by now."""
    dropped = set(batch.rows[~keep].tolist()) - set(batch.rows[keep].tolist())
    names = ("rows", "start_positions", "num_scheduled_tokens", "samples", "lora_slots", "draft_tokens")
    return replace(
        batch,
        **{name: column[keep] for name in names if len(column := getattr(batch, name))},
        new_rows=tuple(new for new in batch.new_rows if new.row not in dropped),
        num_decodes=int(keep[: batch.num_decodes].sum()),
        num_tokens=int(batch.num_scheduled_tokens[keep].sum()),
        transfers=NO_TRANSFERS,
    )


def _spread(keep: BoolArray, tokens: SampledTokens) -> SampledTokens:
    def spread(column: Int32Array, rest: int) -> Int32Array:
        spread = np.full(len(keep), rest, dtype=np.int32)
        spread[keep] = column
        return spread

    indices, drafts = np.flatnonzero(keep).tolist(), tokens.draft_tokens

    def moved(by_index: dict[int, T] | None) -> dict[int, T] | None:
        return by_index and {indices[index]: value for index, value in by_index.items()}

    return replace(
        tokens,
        token_ids=spread(tokens.token_ids, SampledTokens.NOT_FINITE),
        logprobs=moved(tokens.logprobs),
        prompt_logprobs=moved(tokens.prompt_logprobs),
        pooled=moved(tokens.pooled),
        draft_tokens=None if drafts is None else spread(drafts, NO_DRAFT),
    )
