"""Results: a line of JSON per run, then one document."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidewheel.bench.outcome import Outcome
from tidewheel.bench.stage import Run, Stage
from tidewheel.bench.summary import summarise_repeats, summarise_run

SAMPLE_COLUMNS = (
    "sent_s", "lag_s", "ttft_s", "tpot_s", "e2e_s", "prompt_tokens", "output_tokens", "wanted_tokens", "priority",
    "tenant", "error",
)  # fmt: skip


@dataclass(slots=True)
class RunResult:
    run: Run
    outcomes: list[Outcome]
    server: dict[str, float]
    interrupted: bool = False


@dataclass(slots=True)
class StageResult:
    stage: Stage
    runs: list[RunResult] = field(default_factory=list)
    setup: Mapping[str, Any] = field(default_factory=dict)
    _figures: dict[tuple[str, int, int], dict[str, Any]] = field(default_factory=dict)

    def repeats(self, target: str, load: int) -> list[RunResult]:
        """Return complete repeats, or interrupted ones if there are no others."""
        of = [r for r in self.runs if r.run.target.name == target and r.run.load == self.stage.loads[load]]
        return [r for r in of if not r.interrupted] or of

    def outcomes(self, target: str, load: int) -> list[list[Outcome]]:
        return [result.outcomes for result in self.repeats(target, load)]

    def figures(self, target: str, load: int) -> dict[str, Any]:
        """Return the figures; empty if not measured."""
        key = (target, load, len(self.runs))
        if key not in self._figures:
            self._figures[key] = self._summarise(target, load)
        return self._figures[key]

    def _summarise(self, target: str, load: int) -> dict[str, Any]:
        repeats = self.repeats(target, load)
        if not any(result.outcomes for result in repeats):
            return {}
        offered_s = None if repeats[0].interrupted else self.stage.offered_s(self.stage.loads[load])
        figures = summarise_repeats([result.outcomes for result in repeats], self.stage.slo, offered_s)
        return {**figures, "repeats": len(repeats), "server": _mean_of([result.server for result in repeats])}


class Recorder:
    def __init__(self, folder: Path, environment: Mapping[str, Any]) -> None:
        self.folder = folder
        self.environment = dict(environment)
        self.stages: list[StageResult] = []
        self.extra: dict[str, Any] = {}  # across stages
        self._lines = folder / "runs.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._lines.write_text("")

    def begin(self, stage: Stage, setup: Mapping[str, Any] | None = None) -> StageResult:
        result = StageResult(stage, setup=setup or {})
        self.stages.append(result)
        return result

    def add(self, stage: StageResult, result: RunResult) -> None:
        stage.runs.append(result)
        with self._lines.open("a") as file:
            file.write(json.dumps(_clean({"stage": stage.stage.name, **run_record(stage.stage, result)})) + "\n")

    def document(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = _clean(
            {
                **self.environment,
                **self.extra,
                "intervals": "rates: Student's t over repeats; latencies: percentile bootstrap over requests; 95 %",
                "sample_columns": SAMPLE_COLUMNS,
                "stages": [
                    {
                        **result.stage.summary(),
                        "setup": result.setup,
                        "figures": [
                            {"target": target.name, "load": str(load), **result.figures(target.name, index)}
                            for index, load in enumerate(result.stage.loads)
                            for target in result.stage.targets
                        ],
                        "runs": [run_record(result.stage, run) for run in result.runs],
                    }
                    for result in self.stages
                ],
            }
        )
        return cleaned

    def save(self, path: Path | None = None) -> Path:
        path = path or self.folder / "results.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.document(), separators=(",", ":")) + "\n")
        return path


def run_record(stage: Stage, result: RunResult) -> dict[str, Any]:
    run = result.run
    offered_s = None if result.interrupted else stage.offered_s(run.load)
    return {
        "target": run.target.name,
        "load": str(run.load),
        "repeat": run.repeat,
        "seed": run.seed,
        "interrupted": result.interrupted,
        "summary": summarise_run(result.outcomes, stage.slo, offered_s) if result.outcomes else {},
        "server": result.server,
        "samples": [_sample(outcome) for outcome in result.outcomes],
    }


def _sample(outcome: Outcome) -> list[Any]:
    parameters = outcome.offered.parameters
    return [
        outcome.sent,
        outcome.lag,
        outcome.first_token,
        outcome.tpot,
        outcome.latency,
        outcome.num_prompt_tokens,
        outcome.num_tokens,
        outcome.offered.num_output_tokens,
        parameters.get("priority", 0),
        parameters.get("tenant", ""),
        outcome.code,
    ]


def _mean_of(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name: None for one in figures for name in one}
    return {name: sum(one[name] for one in figures if name in one) / len(figures) for name in names}


def _clean(value: Any) -> Any:
    """Make JSON values: NaN as null, six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
