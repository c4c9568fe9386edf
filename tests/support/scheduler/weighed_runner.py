"""A fake runner whose cache also remembers which weights wrote each slot."""

from __future__ import annotations

from collections import defaultdict

from support.engine.fake_runner import FakeRunner
from tidewheel.batch import ScheduledBatch


class WeighedRunner(FakeRunner):
    """Notes by request id the weights of its steps (`computed`), and of all that its attention read (`read`)."""

    computed: dict[str, set[str]]
    read: dict[str, set[str]]

    def _write(self, batch: ScheduledBatch) -> None:
        super()._write(batch)
        for row, start, end in self._chunks(batch):
            self.computed.setdefault(row.new_row.request.request_id, set()).add(batch.weights)
            for position in range(start, end):
                self.slots[self._slot(row, position)] = (f"{row.salt}#{batch.weights}", row.contents[position])

    def _attend(self, batch: ScheduledBatch) -> None:
        for row, _, end in self._chunks(batch):
            for position in range(end):
                content = self.slots.get(self._slot(row, position))
                assert content is not None, "a slot holds nothing"
                salt, _, weights = content[0].rpartition("#")
                assert (salt, content[1]) == (row.salt, row.contents[position]), "a slot holds something else"
                self.read.setdefault(row.new_row.request.request_id, set()).add(weights)


def weighed(runner: FakeRunner) -> WeighedRunner:
    runner.__class__ = WeighedRunner
    assert isinstance(runner, WeighedRunner)
    runner.computed, runner.read = defaultdict(set), defaultdict(set)
    return runner
