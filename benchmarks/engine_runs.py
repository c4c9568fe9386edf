"""A trace on the engine's core in this process."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from clocks import Clock, CpuClock, WallClock
from tidewheel.batch import SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.config import EngineConfig
from tidewheel.engine.build import LoadedRunner, build_scheduler, engine_info, load_model_runner
from tidewheel.engine.core import EngineCore, PendingTokens, Runner
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import TidewheelError
from tidewheel.request import Priority, Request
from tidewheel.sampling import SamplingParams
from tidewheel.scheduler.columns import Int64Array
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.simulate.outcomes import Outcomes
from tidewheel.stats import EngineStats
from tidewheel.workload.traces import Contents, Trace

GREEDY = SamplingParams(temperature=0.0)
STOP_ID = 2
ORDINARY_ID = 3
FIRST_ID = 4  # of prompts


class Engine(NamedTuple):
    """Loaded model; each run has its own scheduler, and so its own cache."""

    config: EngineConfig
    runner: LoadedRunner
    info: EngineInfo


@contextmanager
def loaded(folder: Path, **settings: object) -> Iterator[Engine]:
    config = EngineConfig.from_settings({"model": str(folder), **settings})
    with torch.inference_mode():
        runner = load_model_runner(config)
        yield Engine(config, runner, engine_info(runner.info, config))


class EngineLoop:
    """Loop that adds each request at its arrival time; `on_end` may send more."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Clock, on_end: Callable[[Request], None] = lambda _: None
    ) -> None:
        self.clock = clock
        self.on_end = on_end
        self.requests: list[Request] = []
        self._due: list[tuple[float, int]] = []  # heap of (arrival, place in requests)
        self._num_ended = 0
        self.core = EngineCore(scheduler, runner, self._deliver, receive=self._receive, clock=clock)

    def send(self, request: Request) -> None:
        heapq.heappush(self._due, (request.arrival_time, len(self.requests)))
        self.requests.append(request)

    def run(self) -> None:
        while self._num_ended < len(self.requests):
            if not self.core.step() and self._due:
                self.clock.wait_until(self._due[0][0])

    def _receive(self) -> None:
        now = self.clock()
        while self._due and self._due[0][0] <= now:
            request = self.requests[heapq.heappop(self._due)[1]]
            try:
                self.core.add(request)
            except TidewheelError as error:
                request.error = error
                self._end(request)

    def _deliver(self, outputs: StepOutputs) -> None:
        for request in outputs.finished:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._num_ended += 1
        self.on_end(request)


class EndingTokens(NamedTuple):
    pending: PendingTokens
    batch: ScheduledBatch
    last_positions: Int64Array

    def wait(self) -> SampledTokens:
        sampled = self.pending.wait()
        batch = self.batch
        token_ids = np.where(sampled.token_ids == STOP_ID, ORDINARY_ID, sampled.token_ids)
        ends = batch.samples & (batch.start_positions + batch.num_scheduled_tokens == self.last_positions[batch.rows])
        token_ids[ends] = STOP_ID
        return SampledTokens(sampled.step_id, token_ids.astype(np.int32), sampled.logprobs)


class EndingRunner:
    """Runner whose requests sample their stop token at the trace's length; a random model would end anywhere."""

    def __init__(self, runner: LoadedRunner, trace: Trace) -> None:
        self._runner = runner
        self._trace = trace
        self._last_positions: Int64Array = np.zeros(runner.info.max_num_seqs, dtype=np.int64)

    def launch(self, batch: ScheduledBatch) -> EndingTokens:
        trace = self._trace
        for new in batch.new_rows:
            index = int(new.request_id)
            self._last_positions[new.row] = int(trace.prompt_tokens[index]) + int(trace.output_tokens[index]) - 1
        return EndingTokens(self._runner.launch(batch), batch, self._last_positions.copy())


class RealRun(NamedTuple):
    outcomes: Outcomes
    stats: EngineStats


def run_engine(
    engine: Engine, trace: Trace, config: EngineConfig | None = None, *, cpu_clock: bool = False
) -> RealRun:
    clock: Clock = CpuClock() if cpu_clock else WallClock()
    outcomes, contents = Outcomes(trace), Contents(trace)
    vocab, most = engine.info.vocab_size - FIRST_ID, int(trace.output_tokens.max())
    prompts = [(contents.prompt(i) % vocab + FIRST_ID).astype(np.int32) for i in range(len(trace))]
    began = 0.0

    def record(request: Request) -> None:
        for name in ("first_scheduled_time", "first_token_time", "last_token_time"):
            if (value := getattr(request, name)) is not None:
                setattr(request, name, value - began)
        outcomes.record(int(request.request_id), 0, request)

    scheduler = build_scheduler(config or engine.config, engine.info)
    loop = EngineLoop(scheduler, EndingRunner(engine.runner, trace), clock, record)
    began = clock() - float(trace.arrivals[0])
    for index, prompt in enumerate(prompts):
        request = Request(
            str(index),
            prompt,
            GREEDY,
            max_tokens=most,
            stop_token_ids=(STOP_ID,),
            arrival_time=began + float(trace.arrivals[index]),
            priority=Priority(int(trace.priorities[index])),
            tenant=trace.tenant(index),
        )
        loop.send(request)
    loop.run()
    outcomes.check_complete()
    return RealRun(outcomes, loop.core.stats())
