from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidewheel.bench.arrivals import Load
from tidewheel.bench.outcome import Conversation, Offered, Slo
from tidewheel.bench.targets import Target
from tidewheel.bench.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Equal requests to every target at every load, `repeats` times."""

    name: str
    title: str
    targets: tuple[Target, ...]
    loads: tuple[Load, ...]
    workload: Workload
    seconds: float  # of sending
    repeats: int
    max_requests: int | None = None
    slo: Slo = Slo()  # noqa: RUF009 - immutable
    seed: int = 0
    timeout_s: float = 120.0
    load_names: tuple[str, ...] = ()

    def runs(self) -> Iterator[Run]:
        """Yield runs in turns of targets, starting with a different one each time."""
        for repeat in range(self.repeats):
            for index, load in enumerate(self.loads):
                first = (repeat + index) % len(self.targets)
                for target in (*self.targets[first:], *self.targets[:first]):
                    yield Run(target, load, repeat, seed=self.seed + 1000 * repeat + index)

    def conversations(self, run: Run) -> Iterator[Conversation]:
        """Yield a run's requests: equal for all targets, new for each load and repeat."""
        source = self.workload.conversations(run.seed)
        if run.load.kind == "closed":
            return source
        if run.load.kind == "all":
            return (_at(next(source), 0.0) for _ in range(self.max_requests or 64))
        if run.load.kind == "trace":
            return self._recorded(source, run.load.value)
        times = run.load.times(self.seconds, run.seed)
        limited = times if self.max_requests is None else times[: self.max_requests]
        return (_at(conversation, at) for conversation, at in zip(source, limited, strict=False))

    def label(self, load: Load) -> str:
        return self.load_names[self.loads.index(load)] if self.load_names else str(load)

    def offered_s(self, load: Load) -> float | None:
        """Return the seconds of sending of an open loop, else None."""
        return self.seconds if load.rate is not None else None

    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "targets": [
                {"name": t.name, "kind": t.kind, "settings": _portable(t.settings), "url": t.url}
                for t in self.targets
            ],
            "loads": [{"kind": load.kind, "value": load.value, "burstiness": load.burstiness} for load in self.loads],
            "load_names": self.load_names,
            "workload": self.workload.summary(),
            "seconds": self.seconds,
            "max_requests": self.max_requests,
            "repeats": self.repeats,
            "slo": {"ttft_s": self.slo.ttft_s, "tpot_s": self.slo.tpot_s},
            "seed": self.seed,
            "timeout_s": self.timeout_s,
        }

    def _recorded(self, source: Iterator[Conversation], speed: float) -> Iterator[Conversation]:
        for number, conversation in enumerate(source):
            at = conversation[0].at / speed
            if at > self.seconds or (self.max_requests is not None and number >= self.max_requests):
                return
            yield _at(conversation, at)


@dataclass(frozen=True, slots=True)
class Run:
    target: Target
    load: Load
    repeat: int
    seed: int


def in_turns(stages: Sequence[Stage]) -> list[tuple[int, Run]]:
    """Return (stage index, run): one repeat of every stage, then the next."""
    runs = [(index, run) for index, stage in enumerate(stages) for run in stage.runs()]
    return sorted(runs, key=lambda numbered: numbered[1].repeat)  # stable


def _portable(settings: Mapping[str, str]) -> dict[str, str]:
    """Cut absolute paths to their last part."""
    return {key: Path(value).name if value.startswith("/") else value for key, value in settings.items()}


def _at(conversation: Sequence[Offered], at: float) -> Conversation:
    first = conversation[0]
    moved = Offered(at, first.input_ids, first.num_output_tokens, first.parameters, first.think_s)
    return (moved, *conversation[1:])
