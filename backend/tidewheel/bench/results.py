import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tidewheel.bench.arrivals import LoadPattern
from tidewheel.bench.estimates import Estimate
from tidewheel.bench.outcome import RequestOutcome, Slo
from tidewheel.bench.run_plan import PLAIN, PlannedRun, PlannedStage
from tidewheel.bench.summary import summarise_repeats, summarise_run
from tidewheel.bench.targets import BenchTarget
from tidewheel.bench.workloads import Workload
from tidewheel.workload.lengths import LengthRange

_SAMPLE: Mapping[str, Callable[[RequestOutcome], object]] = {
    "sent_s": lambda o: o.sent,
    "lag_s": lambda o: o.lag,
    "ttft_s": lambda o: o.first_token,
    "tpot_s": lambda o: o.tpot,
    "e2e_s": lambda o: o.latency,
    "prompt_tokens": lambda o: o.num_prompt_tokens,
    "output_tokens": lambda o: o.num_tokens,
    "wanted_tokens": lambda o: o.offered.num_output_tokens,
    "priority": lambda o: o.offered.parameters.get("priority", 0),
    "tenant": lambda o: o.offered.parameters.get("tenant", ""),
    "entry": lambda o: o.offered.entry,
    "error": lambda o: o.code,
}
SAMPLE_COLUMNS = tuple(_SAMPLE)


@dataclass(slots=True)
class RunResult:
    run: PlannedRun
    outcomes: list[RequestOutcome]
    server: dict[str, float]
    interrupted: bool = False

    def record(self, stage: PlannedStage) -> dict[str, Any]:
        offered_s = None if self.interrupted else stage.offered_s(self.run.load)
        return {
            "target": self.run.target.name,
            "load": str(self.run.load),
            "repeat": self.run.repeat,
            "seed": self.run.seed,
            "interrupted": self.interrupted,
            "summary": summarise_run(self.outcomes, stage.slo, offered_s) if self.outcomes else {},
            "server": self.server,
            "samples": [[value(outcome) for value in _SAMPLE.values()] for outcome in self.outcomes],
        }


@dataclass(slots=True)
class StageResult:
    stage: PlannedStage
    runs: list[RunResult] = field(default_factory=list)
    setup: Mapping[str, Any] = field(default_factory=dict)
    _figures: dict[tuple[str, int, int], dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> "StageResult":
        targets = tuple(
            BenchTarget(one["name"], one["kind"], one["settings"], one["url"]) for one in document["targets"]
        )
        result = cls(
            PlannedStage(
                **{name: document[name] for name in PLAIN},
                targets=targets,
                loads=tuple(LoadPattern(**load) for load in document["loads"]),
                workload=Workload(document["workload"]["name"], LengthRange(0, 0), LengthRange(0, 0)),
                slo=Slo(**document["slo"]),
            )
        )
        loads = {str(load): index for index, load in enumerate(result.stage.loads)}
        for figures in document["figures"]:
            values = {key: _estimates(value) for key, value in figures.items() if key not in ("target", "load")}
            result._figures[figures["target"], loads[figures["load"]], 0] = values
        return result

    def add_load(self, load: LoadPattern) -> None:
        loads = sorted({*self.stage.loads, load}, key=lambda one: one.value)
        self.stage = replace(self.stage, loads=tuple(loads))

    def repeats(self, target: str, load: int) -> list[RunResult]:
        of = [r for r in self.runs if r.run.target.name == target and r.run.load == self.stage.loads[load]]
        return [r for r in of if not r.interrupted] or of

    def outcomes(self, target: str, load: int) -> list[list[RequestOutcome]]:
        return [result.outcomes for result in self.repeats(target, load)]

    def figures(self, target: str, load: int) -> dict[str, Any]:
        key = (target, load, len(self.runs))
        if key not in self._figures:
            self._figures[key] = self._summarise(target, load)
        return self._figures[key]

    def document(self) -> dict[str, Any]:
        return {
            **self.stage.summary(),
            "setup": self.setup,
            "figures": [
                {"target": target.name, "load": str(load), **self.figures(target.name, index)}
                for index, load in enumerate(self.stage.loads)
                for target in self.stage.targets
            ],
            "runs": [run.record(self.stage) for run in self.runs],
        }

    def _summarise(self, target: str, load: int) -> dict[str, Any]:
        repeats, outcomes = self.repeats(target, load), self.outcomes(target, load)
        if not any(outcomes):
            return {}
        offered_s = None if repeats[0].interrupted else self.stage.offered_s(self.stage.loads[load])
        figures = summarise_repeats(outcomes, self.stage.slo, offered_s)
        return {**figures, "repeats": len(repeats), "server": _mean_of([result.server for result in repeats])}


class ResultRecorder:
    def __init__(self, folder: Path, environment: Mapping[str, Any]) -> None:
        self.folder = folder
        self.environment = dict(environment)
        self.stages: list[StageResult] = []
        self.extra: dict[str, Any] = {}
        self._lines = folder / "runs.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._lines.write_text("", encoding="utf-8")

    def begin(self, stage: PlannedStage, setup: Mapping[str, Any] | None = None) -> StageResult:
        result = StageResult(stage, setup=setup or {})
        self.stages.append(result)
        return result

    def add(self, result: StageResult, run: RunResult) -> None:
        result.runs.append(run)
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_clean({"stage": result.stage.name, **run.record(result.stage)})) + "\n")

    def save(self) -> Path:
        """Write all results with the sample of every request; return the file."""
        stages = [result.document() for result in self.stages]
        return self._write(self.folder / "results.json", {"sample_columns": SAMPLE_COLUMNS, "stages": stages})

    def save_summaries(self, path: Path) -> Path:
        """Write each stage's figures, without its runs; return the file."""
        stages = [result.document() for result in self.stages if not result.stage.is_preliminary]
        for stage in stages:
            del stage["runs"]
            measured = [one for one in stage["figures"] if len(one) > len(("target", "load"))]
            stage["figures"] = _clean(_without_unknown(measured), digits=4)
        return self._write(path, {"stages": stages})

    def _write(self, path: Path, results: Mapping[str, Any]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        intervals = "rates: Student's t over repeats; latencies: percentile bootstrap over requests; 95 %"
        document = {**self.environment, **self.extra, "intervals": intervals, **results}
        path.write_text(json.dumps(_clean(document), separators=(",", ":")) + "\n", encoding="utf-8")
        return path


def _mean_of(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name: None for one in figures for name in one}
    return {name: sum(one[name] for one in figures if name in one) / len(figures) for name in names}


def _estimates(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _estimates(item) for key, item in value.items()}
    return Estimate(*(math.nan if part is None else part for part in value)) if isinstance(value, list) else value


def _without_unknown(value: Any) -> Any:
    """Return figures with the mean alone where the interval is unknown."""
    if isinstance(value, Mapping):
        return {key: _without_unknown(item) for key, item in value.items()}
    if isinstance(value, Estimate):
        return value if math.isfinite(value.high - value.low) else value.mean
    return [_without_unknown(item) for item in value] if isinstance(value, list) else value


def _clean(value: Any, digits: int = 6) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, digits) for item in value]
    return value
