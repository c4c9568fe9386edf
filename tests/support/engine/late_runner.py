"""A device that computes a step only when its tokens are waited for, and that may run out of memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from support.engine.fake_runner import POISON, FakeRunner
from tidewheel.batch import SampledTokens, ScheduledBatch


class OutOfMemoryError(RuntimeError):
    """Error with the name of torch's."""


@dataclass(eq=False)
class LatePending:
    runner: LateRunner
    batch: ScheduledBatch
    is_again: bool  # rows and transfers were taken over the first time
    fails: bool
    is_done: ClassVar[None] = None

    def wait(self) -> SampledTokens:
        return self.runner.finish(self)


class LateRunner(FakeRunner):
    """A runner that reads a batch late, so that an array shared with the scheduler would show.

    `fails_at_launch` and `fails_late` say how often a step runs out of memory, by its number. After a step that
    failed and is not run again the content of its rows is unknown.
    """

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self.fails_at_launch: Counter[int] = Counter()
        self.fails_late: Counter[int] = Counter()
        self.num_failures = 0
        self.most_in_flight = 0
        self._queue: list[LatePending] = []
        self._failed: ScheduledBatch | None = None  # and not run again yet

    def launch(self, batch: ScheduledBatch) -> LatePending:  # type: ignore[override]
        is_again = batch.step_id < self.num_steps
        assert batch.step_id == self.num_steps - is_again
        self.num_steps += not is_again
        if self._fails(self.fails_at_launch, batch):
            if not is_again:  # its rows are taken over by then
                self._queue.append(LatePending(self, batch, is_again=False, fails=True))
            raise OutOfMemoryError("CUDA out of memory")
        pending = LatePending(self, batch, is_again, self._fails(self.fails_late, batch))
        self._queue.append(pending)
        self.most_in_flight = max(self.most_in_flight, len(self._queue))
        return pending

    def _fails(self, steps: Counter[int], batch: ScheduledBatch) -> bool:
        is_due = steps[batch.step_id] > 0
        steps[batch.step_id] -= is_due
        self.num_failures += is_due
        return is_due

    def finish(self, pending: LatePending) -> SampledTokens:
        """Compute all launches up to this one, in order."""
        while True:
            entry = self._queue.pop(0)
            sampled = self._execute(entry)
            if entry is pending:
                break
            assert entry.fails, "a step is waited for before an earlier one"
        if sampled is None:
            raise OutOfMemoryError("CUDA out of memory")
        return sampled

    def _execute(self, entry: LatePending) -> SampledTokens | None:
        if not entry.is_again:
            self._break_rows()
            self._check_shape(entry.batch)
            self._update_rows(entry.batch)
            self._transfer(entry.batch)
        self._failed = entry.batch if entry.fails else None
        return None if entry.fails else self._compute(entry.batch)

    def _break_rows(self) -> None:
        """Poison the rows of a step that failed for good: the next step reads what it did not write."""
        if self._failed is None:
            return
        for (row, start, end), samples in zip(self._chunks(self._failed), self._failed.samples.tolist(), strict=True):
            for position in range(start, end):
                self.slots[self._slot(row, position)] = (row.salt, POISON)
            row.num_computed_tokens, row.is_broken = end, True
            if samples:
                row.append(0)
