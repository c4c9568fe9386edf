"""What a step needs of a runner. `tidewheel.runner.model_runner.ModelRunner` is one; tests have another."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tidewheel.batch import SampledTokens, ScheduledBatch


class PendingTokens(Protocol):
    def wait(self) -> SampledTokens: ...


class Runner(Protocol):
    def launch(self, batch: ScheduledBatch) -> PendingTokens: ...


class Computed(NamedTuple):
    """Tokens that are there already."""

    tokens: SampledTokens

    def wait(self) -> SampledTokens:
        return self.tokens
