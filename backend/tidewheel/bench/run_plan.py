from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidewheel.bench.arrivals import LoadPattern
from tidewheel.bench.outcome import Conversation, OfferedRequest, Slo
from tidewheel.bench.targets import BenchTarget
from tidewheel.bench.workloads import Workload

PLAIN = ("name", "title", "load_names", "seconds", "longest_s", "max_requests", "repeats", "seed", "timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    name: str
    title: str
    targets: tuple[BenchTarget, ...]
    loads: tuple[LoadPattern, ...]
    workload: Workload
    seconds: float  # of sending, in an open loop
    repeats: int
    longest_s: float | None = None  # of a search's point
    max_requests: int | None = None
    slo: Slo = Slo()  # noqa: RUF009 - immutable
    seed: int = 0
    timeout_s: float = 120.0
    load_names: tuple[str, ...] = ()
    is_preliminary: bool = False  # only prepares later stages

    def runs(self) -> "Iterator[PlannedRun]":
        for repeat in range(self.repeats):
            for index, load in enumerate(self.loads):
                first = (repeat + index) % len(self.targets)
                for target in (*self.targets[first:], *self.targets[:first]):
                    yield PlannedRun(target, load, repeat, seed=self.seed + 1000 * repeat + index)

    def conversations(self, run: "PlannedRun") -> Iterator[Conversation]:
        """Yield the requests of a run: equal for all targets, new for each load and repeat."""
        source = self.workload.conversations(run.seed)
        if run.load.kind == "closed":
            return source
        if run.load.kind == "all":
            return (_at(next(source), 0.0) for _ in range(self.max_requests or 64))
        if run.load.kind == "trace":
            return self._recorded(source, run.load.value)
        times = run.load.times(run.longest_s or self.seconds, run.seed)[: self.max_requests]
        return (
            _at(conversation, at, self.workload.other_ids(conversation[0].input_ids, run.ids_shift))
            for conversation, at in zip(source, times, strict=False)
        )

    def label(self, load: LoadPattern) -> str:
        return self.load_names[self.loads.index(load)] if self.load_names else str(load)

    def offered_s(self, load: LoadPattern) -> float | None:
        return self.seconds if load.rate is not None else None

    def summary(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in PLAIN},
            "targets": [target.summary() for target in self.targets],
            "loads": [asdict(load) for load in self.loads],
            "workload": self.workload.summary(),
            "slo": asdict(self.slo),
        }

    def _recorded(self, source: Iterator[Conversation], speed: float) -> Iterator[Conversation]:
        for number, conversation in enumerate(source):
            at = conversation[0].at / speed
            if at > self.seconds or (self.max_requests is not None and number >= self.max_requests):
                return
            yield _at(conversation, at)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    target: BenchTarget
    load: LoadPattern
    repeat: int
    seed: int
    longest_s: float | None = None  # of sending, if a watch may end it
    ids_shift: int = 0  # prompts new to a prefix cache


def in_turns(stages: Sequence[PlannedStage]) -> list[tuple[int, PlannedRun]]:
    runs = [(index, run) for index, stage in enumerate(stages) for run in stage.runs()]
    return sorted(runs, key=lambda numbered: numbered[1].repeat)  # stable


def _at(conversation: Sequence[OfferedRequest], at: float, input_ids: list[int] | None = None) -> Conversation:
    first = conversation[0]
    return (replace(first, at=at, input_ids=input_ids or first.input_ids), *conversation[1:])
