import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tidewheel.bench import BenchError
from tidewheel.bench.arrivals import LoadPattern
from tidewheel.bench.capacity import FEWEST_REQUESTS, CapacitySearch, LoadPoint, PointWatch, Verdict
from tidewheel.bench.deploy import Deployment, TargetEndpoint, deployed
from tidewheel.bench.driver import BenchTransport, LoadDriver, RunLimits, RunProgress
from tidewheel.bench.outcome import UNANSWERED, RequestOutcome
from tidewheel.bench.results import ResultRecorder, RunResult, StageResult
from tidewheel.bench.run_plan import PlannedRun, PlannedStage, in_turns
from tidewheel.bench.scrape import MetricsSampler
from tidewheel.bench.summary import span
from tidewheel.bench.targets import BenchTarget
from tidewheel.bench.terminal import TerminalProgress, run_line
from tidewheel.bench.transports.peer import PeerTransport

WARM_UP_SEED = 999_983
WARM_UP_USERS = 8
WARM_UP_LIMIT_S = 300.0
IDS_SHIFT = 97  # between points of a search

Turn = tuple[StageResult, PlannedRun]


class Experiment:
    """Measurements on one deployment. All `targets` stay up; with `one_at_a_time`, only the measured one."""

    def __init__(
        self,
        deployment: Deployment,
        recorder: ResultRecorder,
        targets: Sequence[BenchTarget] = (),
        *,
        warm_up: int = 16,
        one_at_a_time: bool = False,
    ) -> None:
        self._targets = targets
        self._deployment = deployment
        self._recorder = recorder
        self._warm_up = warm_up
        self._one_at_a_time = one_at_a_time
        self._places: Mapping[str, TargetEndpoint] = {}
        self._runner = asyncio.Runner()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Experiment":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._runner.close()

    def measure(self, stage: PlannedStage) -> StageResult:
        """Raise `BenchError` if a target is missing. Finished runs stay recorded."""
        return self.measure_in_turns([stage])[0]

    def measure_in_turns(self, stages: Sequence[PlannedStage]) -> list[StageResult]:
        """Alternate the runs of stages with equal targets, so that machine drift affects all alike."""
        first = stages[0]
        results = [self._begin(stage) for stage in stages]
        turns = [(results[index], run) for index, run in in_turns(stages)]
        title = first.title if len(stages) == 1 else f"{len(stages)} workloads in turns"
        with TerminalProgress(title, len(turns)) as live:
            for targets, group in self._groups(first.targets, turns):
                self._bring_up(targets, first, live)
                for result, run in group:
                    self._runner.run(self._run(run, result, live))
        return results

    def find_capacities(
        self, stage: PlannedStage, searches: Mapping[str, CapacitySearch], budget_s: float
    ) -> StageResult:
        result = self._begin(replace(stage, loads=(), repeats=1))
        groups = [[target] for target in stage.targets] if self._one_at_a_time else [list(stage.targets)]
        with TerminalProgress(stage.title, None) as live:
            for group in groups:
                self._bring_up(group, stage, live)
                end = time.monotonic() + budget_s / len(groups)
                turns = deque((target, 0) for target in group if target.name in searches)
                while turns and time.monotonic() < end:
                    target, number = turns.popleft()
                    if (point := searches[target.name].next_point()) is not None:
                        verdict = self._measure_point(result, target, number, point, searches[target.name], live)
                        live.say(f"{target.name:18} {point.objective} {verdict} at {point.rate:.3g}/s")
                        turns.append((target, number + 1))
        return result

    def _measure_point(
        self,
        result: StageResult,
        target: BenchTarget,
        number: int,
        point: LoadPoint,
        search: CapacitySearch,
        live: TerminalProgress,
    ) -> Verdict:
        load = LoadPattern("poisson", point.rate)
        result.add_load(load)
        longest_s = max(result.stage.longest_s or 0.0, FEWEST_REQUESTS / point.rate)
        run = PlannedRun(target, load, number, result.stage.seed, longest_s, ids_shift=IDS_SHIFT * (number + 1))
        watch = PointWatch(result.stage.slo, point.objective, result.stage.seconds)
        outcomes = self._runner.run(self._run(run, result, live, watch))
        if any(outcome.code == UNANSWERED for outcome in outcomes):
            self._runner.run(self._await_idle(target, result.stage))
        return search.note(point, outcomes, watch.verdict)

    def _begin(self, stage: PlannedStage) -> StageResult:
        setup = {"warm_up": self._warm_up, "one_at_a_time": self._one_at_a_time}
        if any(target.is_served_here or target.is_peer for target in stage.targets):
            setup |= self._deployment.summary()
        return self._recorder.begin(stage, setup)

    def _groups(
        self, targets: Sequence[BenchTarget], turns: list[Turn]
    ) -> Iterator[tuple[Sequence[BenchTarget], list[Turn]]]:
        if not self._one_at_a_time:
            yield targets, turns
            return
        for _, of_repeat in itertools.groupby(turns, key=lambda turn: turn[1].repeat):
            group = list(of_repeat)
            for target in targets:
                yield (target,), [turn for turn in group if turn[1].target == target]

    def _bring_up(self, targets: Sequence[BenchTarget], stage: PlannedStage, live: TerminalProgress) -> None:
        if self._places and all(target.name in self._places for target in targets):
            return
        if not self._one_at_a_time and all(target in self._targets for target in targets):
            targets = self._targets
        self._end()
        live.say(text := "starting " + ", ".join(target.name for target in targets))
        with_ids = stage.workload.turns > 1
        with live.waiting(text):
            self._places = self._stack.enter_context(deployed(self._deployment, targets, with_ids=with_ids))
        for target in targets:
            transport = self._places[target.name].transport
            self._runner.run(transport.open())
            self._stack.callback(self._close, transport)
            if isinstance(transport, PeerTransport):
                self._recorder.environment["versions"] |= transport.versions
            with live.waiting(f"warming {target.name}"):
                self._runner.run(self._warm(target, stage))

    def _close(self, transport: BenchTransport) -> None:
        self._runner.run(transport.close())

    def _end(self) -> None:
        self._stack.close()
        self._stack = contextlib.ExitStack()
        self._places = {}

    async def _warm(self, target: BenchTarget, stage: PlannedStage) -> None:
        if not self._warm_up:
            return
        progress = RunProgress()
        limits = RunLimits(WARM_UP_LIMIT_S, self._warm_up, WARM_UP_LIMIT_S)
        driver = LoadDriver(self._places[target.name].transport, limits, progress)
        await driver.closed_loop(stage.workload.conversations(WARM_UP_SEED), min(WARM_UP_USERS, self._warm_up))
        if progress.outcomes and all(outcome.error for outcome in progress.outcomes):
            first = progress.outcomes[0]
            raise BenchError(f"target {target.name} answers no request: {first.code}: {first.error}")

    async def _await_idle(self, target: BenchTarget, stage: PlannedStage) -> None:
        """Wait until the server has ended cancelled requests, by asking for one token."""
        request = next(stage.workload.conversations(WARM_UP_SEED))[0]
        driver = LoadDriver(self._places[target.name].transport, RunLimits(WARM_UP_LIMIT_S), RunProgress())
        await driver.open_loop([(replace(request, at=0.0, num_output_tokens=1),)])

    async def _run(
        self, run: PlannedRun, result: StageResult, live: TerminalProgress, watch: PointWatch | None = None
    ) -> list[RequestOutcome]:
        stage, place, progress = result.stage, self._places[run.target.name], RunProgress()
        sampler = MetricsSampler(place.metrics_url, place.metrics_model)
        label = f"{run.target.name:18} {stage.label(run.load):>16} #{run.repeat + 1}"
        interrupted = True
        try:
            async with sampler, live.following(label, progress):
                await self._send(run, stage, place, progress, watch)
                interrupted = False
        finally:
            seconds = span(progress.outcomes) or progress.now()
            done = RunResult(run, progress.outcomes, sampler.figures(seconds), interrupted)
            self._recorder.add(result, done)
        live.say(run_line(label, done.outcomes, stage.slo, stage.offered_s(run.load), done.server))
        return progress.outcomes

    @staticmethod
    async def _send(
        run: PlannedRun, stage: PlannedStage, place: TargetEndpoint, progress: RunProgress, watch: PointWatch | None
    ) -> None:
        driver = LoadDriver(place.transport, RunLimits(stage.seconds, stage.max_requests, stage.timeout_s), progress)
        load = stage.conversations(run)
        if watch is not None:
            load = itertools.takewhile(lambda _: not watch.is_enough(progress.outcomes, progress.now()), load)
            await driver.open_loop(load, lambda: watch.is_settled(progress.outcomes, progress.now()))
        elif run.load.kind == "closed":
            await driver.closed_loop(load, int(run.load.value))
        else:
            await driver.open_loop(load)
