"""A trace on the engine's core in this process."""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common.clocks import Clock, CpuClock, WallClock
from common.random_model import make_model
from modelled.roofline import SHAPES
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
from tidewheel.simulate.calibration import MeasuredStep, measured_steps
from tidewheel.simulate.outcomes import SimulationOutcomes
from tidewheel.simulate.replay import Recording
from tidewheel.stats import EngineStats
from tidewheel.workload.traces import TokenContents, Trace

GREEDY = SamplingParams(temperature=0.0)
STOP_ID = 2
ORDINARY_ID = 3
FIRST_ID = 4  # of prompts


class Engine(NamedTuple):
    """Loaded model; each run has its own scheduler, and so its own cache."""

    config: EngineConfig
    runner: LoadedRunner
    info: EngineInfo
    cpu_clock: bool


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-40m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-clock", action="store_true", help="processor time instead of the wall clock")


@contextmanager
def random_engine(options: argparse.Namespace, settings: Mapping[str, object]) -> Iterator[Engine]:
    """Load random weights by `add_engine_options`."""
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        folder = make_model(Path(scratch), SHAPES[options.shape])
        config = EngineConfig.from_settings({"model": str(folder), "num_threads": options.threads, **settings})
        runner = load_model_runner(config)
        yield Engine(config, runner, engine_info(runner.info, config), options.cpu_clock)


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
                self.core.add_group([request])
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
    is_done: None = None

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
            index = int(new.request.request_id)
            self._last_positions[new.row] = int(trace.prompt_tokens[index]) + int(trace.output_tokens[index]) - 1
        return EndingTokens(self._runner.launch(batch), batch, self._last_positions.copy())


class RealRun(NamedTuple):
    outcomes: SimulationOutcomes
    stats: EngineStats


def recorded_run(engine: Engine, trace: Trace) -> tuple[RealRun, list[MeasuredStep]]:
    with tempfile.TemporaryDirectory() as folder:
        run = run_engine(engine, trace, dataclasses.replace(engine.config, record=folder))
        (path,) = Path(folder).iterdir()
        return run, measured_steps(Recording(path).events())


def run_engine(engine: Engine, trace: Trace, config: EngineConfig | None = None) -> RealRun:
    clock: Clock = CpuClock() if engine.cpu_clock else WallClock()
    outcomes, contents = SimulationOutcomes(trace), TokenContents(trace)
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
            objective=trace.objective(index),
        )
        loop.send(request)
    loop.run()
    outcomes.check_complete()
    return RealRun(outcomes, loop.core.stats())
