"""Progress on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from tidewheel.bench.columns import number
from tidewheel.bench.driver import Progress
from tidewheel.bench.stage import Run

TICK_S = 0.5


class Live:
    """Progress on standard error; without a terminal, only a line per run."""

    def __init__(self, title: str, num_runs: int) -> None:
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=num_runs,
            desc=title,
            unit="run",
            file=sys.stderr,
            disable=not is_terminal,
            dynamic_ncols=True,
            bar_format="{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}<{remaining} {postfix}",
        )

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    async def follow(self, run: Run, load: str, progress: Progress) -> None:
        while True:
            self.note(live_line(run, load, progress))
            await asyncio.sleep(TICK_S)

    def ended(self, run: Run, load: str, summary: Mapping[str, Any], server: Mapping[str, float]) -> None:
        self.say(run_line(run, load, summary, server))
        self._bar.update()

    def note(self, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=True)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal ends no measurement
            tqdm.write(text, file=sys.stderr)


def live_line(run: Run, load: str, progress: Progress) -> str:
    sent, ended, now = len(progress.outcomes), progress.num_ended, progress.now()
    speed = progress.num_tokens_ended / now if progress.start and now > 0 else 0.0
    return f"{run.target.name}, {load}: {ended} of {sent} answered, {speed:.0f} tokens/s"


def run_line(run: Run, load: str, summary: Mapping[str, Any], server: Mapping[str, float]) -> str:
    if not summary:
        return f"{run.target.name:18} {load:>20} #{run.repeat + 1}  nothing was sent"
    ttft, tpot = summary["ttft_s"], summary["tpot_s"]
    parts = [
        f"{run.target.name:18} {load:>20} #{run.repeat + 1}",
        f"{summary['completed']}/{summary['requests']} done",
        f"{number(summary['requests_per_s'])} req/s",
        f"{number(summary['output_tokens_per_s'])} tok/s",
        f"goodput {number(summary['goodput_per_s'])}/s",
        f"TTFT p50 {number(ttft['p50'] * 1e3)} p99 {number(ttft['p99'] * 1e3)} ms",
        f"TPOT p50 {number(tpot['p50'] * 1e3)} ms",
    ]
    if "batch_size" in server:
        parts.append(f"batch {server['batch_size']:.1f}")
    if summary["errors"]:
        parts.append("errors " + ", ".join(f"{code} {count}" for code, count in summary["errors"].items()))
    return "  ".join(parts)
