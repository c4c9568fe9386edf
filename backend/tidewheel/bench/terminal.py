import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Mapping

from tqdm import tqdm

from tidewheel.bench.driver import RunProgress
from tidewheel.bench.figure_columns import COLUMNS, SHORT, capacity_table, class_table, table, verdicts
from tidewheel.bench.outcome import RequestOutcome, Slo
from tidewheel.bench.results import ResultRecorder
from tidewheel.bench.summary import summarise_run
from tidewheel.server.console import WaitLine, waiting

TICK_S = 0.5
_RUN_COLUMNS = ("done", "output", "within", "within e2e", "TTFT p50", "TTFT p99", "TPOT p50", "batch")
_BAR = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}<{remaining} {postfix}"


class TerminalProgress:
    def __init__(self, title: str, num_runs: int | None) -> None:
        self._bar = tqdm(
            total=num_runs,
            desc=title,
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            bar_format=_BAR,
        )

    def __enter__(self) -> "TerminalProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @contextlib.asynccontextmanager
    async def following(self, label: str, progress: RunProgress) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow(label, progress, WaitLine()))
        try:
            yield
        finally:
            task.cancel()
            self._bar.update()

    async def _follow(self, label: str, progress: RunProgress, line: WaitLine) -> None:
        while True:
            text = f"{label}: {progress.num_ended} of {len(progress.outcomes)} answered"
            if self._bar.disable:
                line.update(text)
            else:
                self.note(text)
            await asyncio.sleep(TICK_S)

    @staticmethod
    def waiting(what: str) -> contextlib.AbstractContextManager[None]:
        return waiting(lambda: what)

    def note(self, text: str) -> None:
        self._bar.set_postfix_str(text, refresh=True)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed terminal ends no measurement
            tqdm.write(text, file=sys.stderr)


def run_line(
    label: str, outcomes: list[RequestOutcome], slo: Slo, offered_s: float | None, server: Mapping[str, float]
) -> str:
    if not outcomes:
        return f"{label}  nothing was sent"
    figures = {**summarise_run(outcomes, slo, offered_s), "server": server}
    columns = (COLUMNS[title] for title in _RUN_COLUMNS)
    shown = (f"{column.title} {column.cell(figures)} {column.unit}" for column in columns)
    return "  ".join((label, f"{figures['completed']}/{len(outcomes)} answered", *shown))


def result_tables(recorder: ResultRecorder) -> Iterator[str]:
    if recorder.extra.get("capacities"):
        yield capacity_table(recorder.extra).as_text()
    for result in recorder.stages:
        if not result.stage.is_preliminary:
            figures = table(result, SHORT).without_empty().as_text()
            yield "\n".join([result.stage.title, figures, "", *verdicts(result)])
            if (classes := class_table(result)).rows:
                yield classes.without_empty().as_text()
