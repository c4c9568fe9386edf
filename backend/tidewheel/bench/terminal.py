"""Progress and results on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator

from tqdm import tqdm

from tidewheel.bench.driver import Progress
from tidewheel.bench.estimates import quantile
from tidewheel.bench.figure_columns import SHORT, capacity_table, table
from tidewheel.bench.outcome import Outcome, Slo
from tidewheel.bench.results import Recorder
from tidewheel.bench.summary import rates
from tidewheel.bench.text_tables import number

TICK_S = 0.5
_BAR = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}<{remaining} {postfix}"


class Live:
    """Progress on standard error; without a terminal, only a line per run."""

    def __init__(self, title: str, num_runs: int | None) -> None:
        self._bar = tqdm(
            total=num_runs,
            desc=title,
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            bar_format=_BAR,
        )

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @contextlib.asynccontextmanager
    async def following(self, label: str, progress: Progress) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow(label, progress))
        try:
            yield
        finally:
            task.cancel()
            self._bar.update()

    async def _follow(self, label: str, progress: Progress) -> None:
        while True:
            self.note(f"{label}: {progress.num_ended} of {len(progress.outcomes)} answered")
            await asyncio.sleep(TICK_S)

    def note(self, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=True)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal ends no measurement
            tqdm.write(text, file=sys.stderr)


def run_line(label: str, outcomes: list[Outcome], slo: Slo, offered_s: float | None, batch: float | None) -> str:
    if not outcomes:
        return f"{label}  nothing was sent"
    rate = rates(outcomes, slo, offered_s)
    ttft = [o.first_token * 1e3 for o in outcomes if o.first_token is not None]
    tpot = [o.tpot * 1e3 for o in outcomes if o.tpot is not None]
    return "  ".join(
        (
            label,
            f"{sum(o.is_complete for o in outcomes)}/{len(outcomes)} done",
            f"{number(rate['requests_per_s'])} req/s",
            f"{number(rate['output_tokens_per_s'])} tok/s",
            f"within {number(rate['slo_attainment'] * 100)} %, e2e {number(rate['e2e_attainment'] * 100)} %",
            f"TTFT p50 {number(quantile(ttft, 0.5))} p99 {number(quantile(ttft, 0.99))} ms",
            f"TPOT p50 {number(quantile(tpot, 0.5))} ms",
            f"batch {number(batch)}",
        )
    )


def result_tables(recorder: Recorder) -> Iterator[str]:
    """Yield tables of capacities, then of each stage."""
    if recorder.extra.get("capacities"):
        yield capacity_table(recorder.extra).as_text()
    for result in recorder.stages:
        if not result.stage.is_preliminary:
            yield f"{result.stage.title}\n{table(result, SHORT).without_empty().as_text()}"
