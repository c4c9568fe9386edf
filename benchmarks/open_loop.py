"""The real engine in this process, fed by a trace in real time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tidewheel.batch import SampledTokens, ScheduledBatch, StepOutputs
from tidewheel.config import EngineConfig
from tidewheel.engine.build import LoadedRunner, build_scheduler, engine_info, load_model_runner
from tidewheel.engine.core import EngineCore, PendingTokens
from tidewheel.engine.messages import EngineInfo
from tidewheel.errors import TidewheelError
from tidewheel.request import Priority, Request
from tidewheel.sampling import SamplingParams
from tidewheel.scheduler.columns import Int64Array
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
    runner = load_model_runner(config)
    yield Engine(config, runner, engine_info(runner.info, config))


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
    """Runner whose requests sample their stop token at the trace's length, unknown to the scheduler.

    A random model would end anywhere.
    """

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


class WallClock:
    def __call__(self) -> float:
        return time.monotonic()

    def wait(self) -> None:
        time.sleep(1e-3)


class CpuClock:
    """Processor time plus skipped pauses: wall time on an idle machine."""

    def __init__(self) -> None:
        self._paused = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._paused

    def wait(self) -> None:
        self._paused += 1e-3


class RealRun(NamedTuple):
    outcomes: Outcomes
    stats: EngineStats


class OpenLoop:
    def __init__(self, engine: Engine, trace: Trace, config: EngineConfig, clock: WallClock | CpuClock) -> None:
        self._clock = clock
        self._trace = trace
        self._contents = Contents(trace)
        self._max_tokens = int(trace.output_tokens.max())
        self._vocab = engine.info.vocab_size
        self._next = 0
        self._num_ended = 0
        self.outcomes = Outcomes(trace)
        self._core = EngineCore(
            build_scheduler(config, engine.info),
            EndingRunner(engine.runner, trace),
            self._deliver,
            receive=self._receive,
            clock=clock,
        )
        self._started = 0.0

    def run(self) -> RealRun:
        self._started = self._clock() - float(self._trace.arrivals[0])
        while self._num_ended < len(self._trace):
            if not self._core.step():
                self._clock.wait()
        self.outcomes.check_complete()
        return RealRun(self.outcomes, self._core.stats())

    def _receive(self) -> None:
        now = self._clock() - self._started
        while self._next < len(self._trace) and self._trace.arrivals[self._next] <= now:
            request = self._request(self._next)
            self._next += 1
            try:
                self._core.add(request)
            except TidewheelError as error:
                request.error = error
                self._end(request)

    def _request(self, index: int) -> Request:
        trace = self._trace
        prompt = self._contents.prompt(index) % (self._vocab - FIRST_ID) + FIRST_ID
        return Request(
            str(index),
            prompt.astype(np.int32),
            GREEDY,
            max_tokens=self._max_tokens,
            stop_token_ids=(STOP_ID,),
            arrival_time=self._started + float(trace.arrivals[index]),
            priority=Priority(int(trace.priorities[index])),
            tenant=trace.tenant(index),
        )

    def _deliver(self, outputs: StepOutputs) -> None:
        for request in outputs.finished:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._num_ended += 1
        for name in ("first_scheduled_time", "first_token_time", "last_token_time"):
            if (value := getattr(request, name)) is not None:
                setattr(request, name, value - self._started)
        self.outcomes.record(int(request.request_id), 0, request)


def run_engine(
    engine: Engine, trace: Trace, config: EngineConfig | None = None, *, cpu_clock: bool = False
) -> RealRun:
    with torch.inference_mode():
        return OpenLoop(engine, trace, config or engine.config, CpuClock() if cpu_clock else WallClock()).run()
