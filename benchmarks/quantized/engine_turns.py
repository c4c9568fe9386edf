"""Engines in turns, quiet and beside busy processes, and what their runs come to."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from common.busy_processes import busy_processes, read_bytes_per_s
from common.study import BUILD, ROOT, in_turns
from quantized.completion_streams import StreamsRun
from tidewheel.bench import peer_engines
from tidewheel.bench.worker_process import WorkerProcess
from tidewheel_process.process_tree import descendants

LIMIT_S = 300.0
Figures = dict[str, dict[str, dict[str, dict[str, Any]]]]  # by condition, streams, engine and figure


class Condition(NamedTuple):
    """Other processes on the machine."""

    busy: int = 0
    nice: int = 0

    @property
    def name(self) -> str:
        return f"{self.busy} busy at nice {self.nice}" if self.busy else "quiet"

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with busy_processes(self.busy, self.nice):
            yield


class Turn(NamedTuple):
    condition: Condition
    streams: int
    engine: str


def add_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--hogs", type=int, default=0, metavar="N", help="measure beside N busy processes as well")
    parser.add_argument("--hog-nice", type=int, nargs="+", default=[0], metavar="K", help="their niceness, in turn")


def conditions(options: argparse.Namespace) -> list[Condition]:
    """Return the quiet machine, and the busy ones that the options name."""
    return [Condition(), *(Condition(options.hogs, nice) for nice in options.hog_nice if options.hogs)]


def take_turns(runs: Mapping[Turn, Callable[[int], StreamsRun]], rounds: int) -> Figures:
    """Run all `rounds` times, each with the number of its round; return medians and samples."""

    def run(turn: Turn) -> StreamsRun:
        number = numbers[turn] = numbers[turn] + 1
        with turn.condition():
            return runs[turn](number)

    names = {" ".join(map(str, (turn.condition.name, turn.streams, turn.engine))): turn for turn in runs}
    numbers = dict.fromkeys(runs, 0)
    taken = in_turns({name: lambda turn=turn: run(turn) for name, turn in names.items()}, rounds, warm_up=0)
    found: Figures = {}
    for name, turn in names.items():
        of_turn = found.setdefault(turn.condition.name, {}).setdefault(str(turn.streams), {})
        of_turn[turn.engine] = medians([one.figures for one in taken[name]])
    return found


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the median of each figure, and all samples of the first."""
    first, *_ = runs[0]
    found: dict[str, Any] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    rounded = {name: float(f"{value:.4g}") for name, value in found.items()}
    return rounded | {"samples": [float(f"{run[first]:.4g}") for run in runs]}


def rows(found: Figures, ours: str, peer: str, goals: Mapping[int, float]) -> Iterator[dict[str, object]]:
    """Yield a line for each condition and number of streams: both rates, their ratio, its goal, and latencies."""
    for condition, of_condition in found.items():
        for streams, engines in of_condition.items():
            if ours not in engines or peer not in engines:
                continue
            mine, theirs = engines[ours], engines[peer]
            others = {name: figures["tokens_per_s"] for name, figures in engines.items() if name not in (ours, peer)}
            yield {
                "machine": condition, "streams": streams, ours: mine["tokens_per_s"], peer: theirs["tokens_per_s"],
                "ratio": ratio(mine, theirs, "tokens_per_s"), "goal": goals.get(int(streams), 1.0), **others,
                "first ratio": ratio(mine, theirs, "first_token_ms"), "first ms": mine["first_token_ms"],
                "p99 gap ms": mine["gap_p99_ms"], f"p99 of {peer}": theirs["gap_p99_ms"],
                "of quiet": ratio(mine, of_quiet(found, streams, ours), "tokens_per_s"),
                f"of quiet, {peer}": ratio(theirs, of_quiet(found, streams, peer), "tokens_per_s"),
            }  # fmt: skip


def of_quiet(found: Figures, streams: str, engine: str) -> dict[str, Any]:
    return found[Condition().name][streams][engine]


def ratio(ours: Mapping[str, float], theirs: Mapping[str, float], name: str) -> float:
    return round(ours[name] / theirs[name], 3) if theirs[name] else 0.0


def floor(num_bytes: int, threads: int, engines: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return milliseconds of a plain read of so many bytes, and its share of a step at one stream, by engine."""
    rate = read_bytes_per_s(num_bytes, threads)
    read_ms = 1e3 * num_bytes / rate
    shares = {name: round(read_ms / figures["step_ms"], 3) for name, figures in engines.items()}
    return {"bytes": num_bytes, "gb_per_s": round(rate / 1e9, 2), "read_ms": round(read_ms, 3), "share": shares}


def memory_mib(pid: int) -> float:
    """Return the proportional memory (PSS) of a process and all below it."""
    pids = [pid, *(process.pid for process in descendants(pid))]
    return round(sum(map(_pss_kib, pids)) / 1024, 1)


def _pss_kib(pid: int) -> int:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


class EngineProcess:
    """An engine of `tidewheel.bench.peer_engines` in a process, which takes token ids."""

    def __init__(self, name: str, kind: str, options: Mapping[str, object], python: str = sys.executable) -> None:
        folders = [str(ROOT / part) for part in ("backend", "kernels", "client", "process", "queue")]
        environment = {"PYTHONPATH": os.pathsep.join(folders)} if kind == "llm" else {}
        command = [python, str(Path(peer_engines.__file__)), kind, json.dumps(options)]
        self._worker = WorkerProcess(name, command, BUILD / f"{name.replace(' ', '_')}.log", environment)
        self.versions: dict[str, str] = {}

    def __enter__(self) -> EngineProcess:
        self.versions = self._worker.receive(LIMIT_S)["versions"]
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.stop()

    def run(
        self, prompts: Iterable[Sequence[int]], num_tokens: Sequence[int], loras: Sequence[str] = (), **more: object
    ) -> StreamsRun:
        """Answer all prompts at once, with so many tokens each. `loras`: their adapters (none: the base model).

        `more`: fields of each request.
        """
        given = list(prompts)
        began = time.monotonic()
        for number, (prompt, count) in enumerate(zip(given, num_tokens, strict=True)):
            adapter = {"lora": loras[number]} if loras else {}
            self._worker.send({"id": number, "input_ids": list(prompt), "max_tokens": count, **adapter, **more})
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        gaps, num_done = [], 0
        while num_done < len(given):
            events, now = self._worker.receive(LIMIT_S), time.monotonic() - began
            for number, count, is_done in events:
                if count:
                    gaps += [now - last[number]] if number in last else []
                    first.setdefault(number, now)
                    last[number] = now
                num_done += is_done
        return StreamsRun(
            sum(num_tokens), max(last.values()), list(first.values()), gaps, [len(one) for one in given]
        )
