"""Measurements without a server: a target in this process, and outcomes made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tidewheel.bench.arrivals import LoadPattern
from tidewheel.bench.outcome import OfferedRequest, RequestOutcome, Slo
from tidewheel.bench.results import ResultRecorder, RunResult, StageResult
from tidewheel.bench.run_plan import PlannedRun, PlannedStage
from tidewheel.bench.targets import BenchTarget
from tidewheel.bench.workloads import WORKLOADS

ENVIRONMENT: dict[str, Any] = {
    "commit": "0123456789ab",
    "command": "tidewheel bench --target <continuous>",
    "started": "2026-01-01T00:00:00+00:00",
    "machine": {"processor": "A & B", "cores": 2, "gpu": None, "system": "Linux"},
    "versions": {"python": "3.11"},
}


def outcome(
    *,
    sent: float = 0.0,
    ttft: float = 0.1,
    tpot: float = 0.01,
    tokens: int = 11,
    wanted: int | None = None,
    code: str = "",
    streamed: bool = True,
    **parameters: Any,
) -> RequestOutcome:
    """Make an answered request with evenly spaced tokens, or with a `code` one that failed after `ttft`."""
    one = RequestOutcome(
        OfferedRequest(sent, [5, 6], wanted or tokens, parameters), sent, streamed=streamed, num_prompt_tokens=2
    )
    if code:
        one.error, one.code, one.ended = "refused", code, ttft
        return one
    times = [ttft + index * tpot for index in range(tokens)]
    one.first_token, one.last_token, one.num_tokens = times[0], times[-1], tokens
    one.chunks = [(time, 1) for time in times]
    one.ended, one.finish_reason = times[-1], "length"
    return one


class FakeTransport:
    """A target that answers at once with as many tokens as were asked for; `answer` may act first."""

    can_cancel = True

    def __init__(self, answer: Callable[[RequestOutcome], Any] | None = None) -> None:
        self._answer = answer
        self.prompts: list[list[int]] = []
        self.running = 0
        self.most_running = 0
        self.is_open = False

    async def open(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    async def send(self, offered: OfferedRequest, input_ids: Sequence[int], outcome: RequestOutcome) -> None:
        self.prompts.append(list(input_ids))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            if self._answer is not None:
                waited = self._answer(outcome)
                if waited is not None:
                    await waited
            outcome.add_tokens(1)
            outcome.add_tokens(offered.num_output_tokens - 1)
            outcome.token_ids += [7] * offered.num_output_tokens
        finally:
            self.running -= 1


def stage(
    names: Sequence[str] = ("continuous", "baseline_dynamic"), loads: Sequence[LoadPattern] = (), **changes: Any
) -> PlannedStage:
    kinds = {"baseline_dynamic": "baseline", "transformers": "transformers"}
    settings: dict[str, Any] = {
        "name": "run",
        "title": "A <test>",
        "targets": tuple(BenchTarget(name, kinds.get(name, "ours")) for name in names),
        "loads": tuple(loads) or (LoadPattern("poisson", 2.0), LoadPattern("closed", 4)),
        "workload": WORKLOADS["mixed"],
        "seconds": 10.0,
        "repeats": 2,
        "slo": Slo(1.0, 0.1),
    }
    return PlannedStage(**{**settings, **changes})


def measured(of: PlannedStage, make: Callable[[PlannedRun], list[RequestOutcome]]) -> StageResult:
    """Build a stage whose every run gave the outcomes of `make`."""
    result = StageResult(of)
    for run in of.runs():
        result.runs.append(RunResult(run, make(run), {"batch_size": 4.0, "device_busy": 0.5}))
    return result


def recorder(folder: Path, *stages: StageResult) -> ResultRecorder:
    one = ResultRecorder(folder, ENVIRONMENT)
    for result in stages:
        recorded = one.begin(result.stage)
        for run in result.runs:
            one.add(recorded, run)
    return one
