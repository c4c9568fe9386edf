"""Interface of `tidewheel.runner.model_runner.ModelRunner`; tests have their own."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tidewheel.batch import SampledTokens, ScheduledBatch


class PendingTokens(Protocol):
    def wait(self) -> SampledTokens: ...


class Runner(Protocol):
    def launch(self, batch: ScheduledBatch) -> PendingTokens: ...


class Computed(NamedTuple):
    """Tokens that are already computed."""

    tokens: SampledTokens

    def wait(self) -> SampledTokens:
        return self.tokens
