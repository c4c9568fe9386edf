"""Host work of a decode step by part, and the device's wait for it, without and with one step ahead.

    python benchmarks host_timeline --save

An engine, from the ZeroMQ socket to the real `ModelRunner`, runs on a modelled device; a client process reads its
output. Steps take the seconds of `roofline.py`, which no kernel beats, so the host's share is at its worst. Times are
CPU time of the engine's thread, so other programs take no part in it; `--clock wall` takes real time.

Left out: the CUDA driver's launches (with graphs, two graph launches, three copies and three events a decode step),
ZeroMQ's threads, and prompts.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import zmq

from common.clocks import Clock, CpuClock, WallClock
from common.study import RESULTS, Study
from modelled.device import ModelledDevice, modelled_runner
from modelled.roofline import H200, SHAPES, decode_seconds, prefill_seconds
from tidewheel.bench.charts import COLOURS, ChartImage, panels, style
from tidewheel.config import EngineConfig
from tidewheel.engine import front_ends
from tidewheel.engine.build import build_scheduler, engine_info
from tidewheel.engine.messages import PROTOCOL, AddRequest, Hello, encoder
from tidewheel.engine.server import EngineServer
from tidewheel.runner.step_graphs import decode_sizes
from tidewheel.sampling import SamplingParams

WARM_UP_STEPS = 50  # after all requests run
SEED = 0
PARTS = {  # in step order
    "receive": "read commands from the socket",
    "schedule": "deadlines and schedule",
    "inputs": "input arrays of the step",
    "plan": "sampling plan",
    "stage": "pack and queue the copy",
    "launch": "the rest of the launch",
    "wait": "collect the tokens, without waiting",
    "apply": "apply",
    "deliver": "make deltas",
    "send": "encode and send",
    "loop": "the loop itself",
}


class Segment(NamedTuple):
    part: str
    begin: float
    end: float


class Parts:
    """Times of parts of the host's work, taken by wrapping methods of live objects."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.segments: list[Segment] = []
        self._clock = clock
        self._stack: list[str] = []
        self._since = 0.0

    def wrap(self, owner: object, names: str, part: str) -> None:
        """Count these methods of `owner` as `part`, without calls into other parts."""
        for name in names.split():
            setattr(owner, name, self.wrapped(getattr(owner, name), part))

    def wrapped(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return call

    def _enter(self, part: str) -> None:
        self._cut()
        self._stack.append(part)

    def _leave(self) -> None:
        self._cut()
        self._stack.pop()

    def _cut(self) -> None:
        now = self._clock()
        if self._stack:
            self.segments.append(Segment(self._stack[-1], self._since, now))
        self._since = now

    def between(self, begin: float, end: float) -> list[Segment]:
        return [segment for segment in self.segments if segment.begin >= begin and segment.end <= end]


def seconds_by_step(segments: list[Segment], ends: list[float]) -> dict[str, list[float]]:
    """Return seconds by part and step; `ends` starts with the first step's begin."""
    steps = np.searchsorted(ends, [segment.begin for segment in segments], side="right") - 1
    found = {part: [0.0] * (len(ends) - 1) for part in dict.fromkeys(segment.part for segment in segments)}
    for segment, step in zip(segments, steps.tolist(), strict=True):
        if 0 <= step < len(ends) - 1:
            found[segment.part][step] += segment.end - segment.begin
    return found


@dataclass(frozen=True, slots=True)
class Run:
    is_async: bool
    host_us: dict[str, float]  # medians over steps
    host_us_total: float  # median of the steps' sums
    host_us_p99: float
    idle_fraction: float  # of the device
    step_us: float  # between completions, median


def client(address: str, count: int, prompt_tokens: int, max_tokens: int) -> None:
    generator = np.random.default_rng(SEED)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, 0)
    socket.connect(address)
    socket.send(encoder.encode(Hello(PROTOCOL, "benchmark", "")))
    for key in range(count):
        length = int(generator.integers(prompt_tokens // 2, prompt_tokens * 3 // 2))
        prompt = generator.integers(3, 60, length).astype("<i4").tobytes()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.6, ignore_eos=True)
        socket.send(encoder.encode(AddRequest(key, prompt, sampling)))
    while True:
        socket.recv()


class Engine:
    def __init__(self, options: argparse.Namespace, model: str, *, is_async: bool) -> None:
        self.is_async = is_async
        self.running: int = options.running
        self.num_steps: int = options.steps
        self.clock: Clock = CpuClock(time.thread_time) if options.clock == "cpu" else WallClock()
        self.parts = Parts(self.clock)
        self.device = ModelledDevice(self.clock)
        shape = SHAPES[model]
        self.max_tokens = 4 * (self.num_steps + WARM_UP_STEPS)
        self.prompt_tokens: int = options.context
        self.config = config = EngineConfig(
            model=model, max_num_seqs=self.running, max_num_batched_tokens=8192, async_scheduling=is_async
        )
        runner = modelled_runner(
            self.device,
            decode_seconds=decode_seconds(shape, self.running, options.context),
            prefill_seconds=prefill_seconds(shape, [1024]) / 1024,
            max_num_seqs=self.running,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=2 * self.prompt_tokens + self.max_tokens,
            graph_sizes=decode_sizes(self.running),
        )
        self.info = engine_info(runner.info, config)
        self.scheduler = build_scheduler(config, self.info)
        self.runner = runner
        self.ends: list[float] = []  # of the measured steps and the one before

    def _measure(self, server: EngineServer) -> None:
        parts, core, runner = self.parts, server._core, self.runner
        core.receive = parts.wrapped(core.receive, "receive")
        core.deliver = parts.wrapped(core.deliver, "deliver")
        core.step = parts.wrapped(core.step, "loop")
        parts.wrap(self.scheduler, "expire schedule", "schedule")
        parts.wrap(self.scheduler, "apply", "apply")
        parts.wrap(self.scheduler.admission, "waiting_room", "schedule")
        parts.wrap(runner._rows, "update host_inputs padded", "inputs")
        parts.wrap(runner._sampling, "update plan", "plan")
        parts.wrap(runner, "_send", "stage")
        parts.wrap(server._front_ends, "flush send_room", "send")
        launch = parts.wrapped(runner.launch, "launch")

        def launched(batch: Any) -> Any:
            pending = launch(batch)
            pending.wait = parts.wrapped(pending.wait, "wait")
            return pending

        runner.launch = launched
        wait_until = self.clock.wait_until
        self.clock.wait_until = parts.wrapped(wait_until, "device")

    def serve(self) -> Run:
        with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            address = f"ipc://{folder}/socket"
            socket.set(zmq.ROUTER_MANDATORY, 1)
            socket.set(zmq.SNDHWM, 0)
            socket.set(zmq.LINGER, 0)
            socket.bind(address)
            arguments = (address, self.running, self.prompt_tokens, self.max_tokens)
            peer = multiprocessing.get_context("spawn").Process(target=client, args=arguments, daemon=True)
            peer.start()
            try:
                server = EngineServer(
                    socket, self.scheduler, self.runner, self.info,
                    config=self.config, clock=self.clock,
                )  # fmt: skip
                server.linger_s = 1e9
                while not socket.poll(100):
                    if not peer.is_alive():
                        raise RuntimeError("the client ended before it sent anything")
                self._measure(server)
                gc.collect()
                gc.freeze()
                server.serve(self._must_stop_after(server))
            finally:
                peer.kill()
                peer.join()
                gc.unfreeze()
        return self._run()

    def _must_stop_after(self, server: EngineServer) -> Any:
        num_full = 0
        flush = server._front_ends.flush

        def count() -> None:
            nonlocal num_full
            flush()
            num_full += self.scheduler.num_running == self.running and self.scheduler.num_waiting == 0
            if num_full >= WARM_UP_STEPS:
                self.ends.append(self.clock())

        server._front_ends.flush = count
        server._maintain = lambda _stop: "measured" if len(self.ends) > self.num_steps else ""
        return str

    def _run(self) -> Run:
        segments = self.parts.between(self.ends[0], self.ends[-1])
        by_step = seconds_by_step(segments, self.ends)
        by_step.pop("device", None)
        totals = np.array(list(by_step.values())).sum(axis=0) * 1e6
        return Run(
            is_async=self.is_async,
            host_us={part: round(1e6 * statistics.median(by_step.get(part, [0.0])), 1) for part in PARTS},
            host_us_total=round(float(np.median(totals)), 1),
            host_us_p99=round(float(np.quantile(totals, 0.99)), 1),
            idle_fraction=round(self.device.idle_fraction(self.ends[0], self.ends[-1]), 4),
            step_us=round(1e6 * float(np.median(np.diff(self.ends))), 1),
        )


def picture(models: Mapping[str, Any]) -> ChartImage:
    """Draw a record of this study: the duration of a step of each model, and the host's part in it."""
    figure, (above, below) = panels(rows=2, height=5.6)
    rows = [(model, of["device_us"] / 1e3, run) for model, of in models.items() for run in of["runs"][-2:]]
    for row, (_, device_ms, run) in enumerate(rows):
        idle_ms = run["step_us"] / 1e3 - device_ms
        above.barh(row, device_ms, 0.6, color=COLOURS[0])
        above.barh(row, idle_ms, 0.6, left=device_ms, color=COLOURS[1])
        text = f"{run['step_us'] / 1e3:.2f} ms" + f", idle {run['idle_fraction']:.0%}" * bool(run["idle_fraction"])
        above.annotate(text, (device_ms + idle_ms, row), (6, 0), textcoords="offset points", va="center")
    names = [f"{model}, async_scheduling {'on' if run['is_async'] else 'off'}" for model, _, run in rows]
    above.set_yticks(range(len(rows)), names)
    style(above, "A step: the device works (blue), and waits for the host (orange), ms")
    of_host = rows[0][2]["host_us"]
    below.barh(list(of_host), of_host.values(), 0.6, color=COLOURS[1])
    for row, value in enumerate(of_host.values()):
        below.annotate(f"{value:.0f}  {PARTS[list(of_host)[row]]}", (value, row), (6, 0),
                       textcoords="offset points", va="center", fontsize=9)  # fmt: skip
    style(below, f"Work of the host for a step of {rows[0][0]}, µs: {rows[0][2]['host_us_total']:.0f} in all")
    for axes in (above, below):
        axes.invert_yaxis()
        axes.margins(x=0.3)
        axes.grid(axis="y", visible=False)
    return ChartImage("host_timeline", "", figure)


def measure(options: argparse.Namespace, model: str) -> dict[str, Any]:
    runs: list[Run] = []
    for _ in range(options.rounds):
        for is_async in (False, True):
            run = Engine(options, model, is_async=is_async).serve()
            runs.append(run)
            print_run(model, run)
    device_us = 1e6 * decode_seconds(SHAPES[model], options.running, options.context)
    return {"device_us": round(device_us, 1), "runs": [asdict(run) for run in runs]}


def print_run(model: str, run: Run) -> None:
    parts = ", ".join(f"{part} {value:.0f} ({value / run.host_us_total:.0%})" for part, value in run.host_us.items())
    print(
        f"{model} {'on ' if run.is_async else 'off'}: device idle {run.idle_fraction:6.2%}, "
        f"step {run.step_us:.0f} us, host {run.host_us_total:.0f} us (p99 {run.host_us_p99:.0f}): {parts}"
    )


def main() -> None:
    study = Study("host_timeline", __doc__, "numpy", "torch", "pyzmq", "msgspec")
    study.add_argument("--model", nargs="+", choices=list(SHAPES), default=["qwen3-0.6b", "llama-3.1-8b"])
    study.add_argument("--running", type=int, default=256)
    study.add_argument("--context", type=int, default=512, help="tokens of a request, on average")
    study.add_argument("--steps", type=int, default=400, help="measured in each run")
    study.add_argument("--rounds", type=int, default=3)
    study.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    options = study.begin()
    front_ends.SILENCE_LIMIT_S = float("inf")  # engine and client clocks differ
    results = {model: measure(options, model) for model in options.model}
    if options.save:
        (RESULTS / "host_timeline.webp").write_bytes(picture(results).webp())
    settings = {name: getattr(options, name) for name in ("running", "context", "steps", "rounds", "clock")}
    facts = {"load": os.getloadavg(), "device": asdict(H200), "settings": settings, "parts": PARTS}
    study.save({**facts, "models": results})


if __name__ == "__main__":
    main()
