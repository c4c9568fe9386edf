"""Host work of a decode step by part, and the device's wait for it: scheduling after a step is read (off), or one
step ahead (on).

    python benchmarks/host_timeline.py [--model qwen3-0.6b llama-3.1-8b] [--running 256] [--context 512] [--save]

A whole engine process, from the ZeroMQ socket to the real `ModelRunner`, runs on a modelled device, and a client
process reads the output. Steps take the seconds of the roofline (`gpu.limits`), which no kernel beats, so the host's
share is at its worst. Times are CPU time of the engine's thread without waits for the device: other programs may slow
it but take no turns from it. With `--clock wall`, times are wall time and waits sleep.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

import record
from gpu.limits import H200, MODELS, decode_seconds, prefill_seconds
from host_parts import Parts, Segment, seconds_by_step
from modelled_device import Busy, Clock, CpuClock, ModelledDevice, WallClock, modelled_runner
from tidewheel.config import EngineConfig
from tidewheel.engine import front_ends
from tidewheel.engine.build import build_scheduler, engine_info
from tidewheel.engine.messages import PROTOCOL, AddRequest, Hello, encoder
from tidewheel.engine.server import EngineServer
from tidewheel.runner.decode_graphs import decode_sizes
from tidewheel.sampling import SamplingParams

WARM_UP_STEPS = 50  # after all requests run
SHOWN_STEPS = 10
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
COLOURS = dict(zip(PARTS, ("#9ecae1", "#3182bd", "#fdd0a2", "#fdae6b", "#fd8d3c", "#d94801", "#c7c7c7", "#31a354",
                           "#bcbddc", "#756bb1", "#636363"), strict=True))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    is_async: bool
    host_us: dict[str, float]  # medians over steps
    host_us_total: float  # median of the steps' sums
    host_us_p99: float
    idle_fraction: float  # of the device
    step_us: float  # between completions, median


class Timeline(msgspec.Struct):
    segments: list[Segment]
    busy: list[Busy]
    begin: float
    end: float


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
        self.clock: Clock = CpuClock() if options.clock == "cpu" else WallClock()
        self.parts = Parts(self.clock)
        self.device = ModelledDevice(self.clock)
        shape = MODELS[model]
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
        core._receive = parts.wrapped(core._receive, "receive")
        core._deliver = parts.wrapped(core._deliver, "deliver")
        core.step = parts.wrapped(core.step, "loop")  # type: ignore[method-assign]
        parts.wrap(self.scheduler, "expire schedule", "schedule")
        parts.wrap(self.scheduler, "apply", "apply")
        parts.wrap(core, "room", "schedule")
        parts.wrap(runner._rows, "update host_inputs padded", "inputs")
        parts.wrap(runner, "_plan", "plan")
        parts.wrap(runner, "_send", "stage")
        parts.wrap(server._front_ends, "flush tell_room", "send")
        launch = parts.wrapped(runner.launch, "launch")

        def launched(batch: Any) -> Any:
            pending = launch(batch)
            pending.wait = parts.wrapped(pending.wait, "wait")
            return pending

        runner.launch = launched  # type: ignore[method-assign]
        wait_until = self.clock.wait_until
        self.clock.wait_until = parts.wrapped(wait_until, "device")  # type: ignore[method-assign]

    def serve(self) -> tuple[Run, Timeline]:
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
                    config=self.config, linger_s=1e9, clock=self.clock,
                )  # fmt: skip
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
        return self._run(), self._timeline()

    def _must_stop_after(self, server: EngineServer) -> Any:
        num_full = 0
        flush = server._front_ends.flush

        def count() -> None:
            nonlocal num_full
            flush()
            num_full += self.scheduler.num_running == self.running and self.scheduler.num_waiting == 0
            if num_full >= WARM_UP_STEPS:
                self.ends.append(self.clock())

        server._front_ends.flush = count  # type: ignore[method-assign]
        server._keep_house = lambda _stop: (  # type: ignore[method-assign]
            "measured" if len(self.ends) > self.num_steps else ""
        )
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

    def _timeline(self) -> Timeline:
        begin, end = self.ends[-1 - SHOWN_STEPS], self.ends[-1]
        busy = [work for work in self.device.busy if work.end > begin and work.begin < end]
        return Timeline(self.parts.between(begin, end), busy, begin, end)


def plot(timelines: dict[bool, Timeline], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    span = max(timeline.end - timeline.begin for timeline in timelines.values())
    figure, axes = pyplot.subplots(2, 1, figsize=(14, 4.6), sharex=True, layout="constrained")
    for axis, (is_async, timeline) in zip(axes, sorted(timelines.items()), strict=True):
        for part, colour in COLOURS.items():
            bars = [
                (1e3 * (segment.begin - timeline.begin), 1e3 * (segment.end - segment.begin))
                for segment in timeline.segments
                if segment.part == part
            ]
            axis.broken_barh(bars, (1.1, 0.8), color=colour, linewidth=0, label=part)
        steps = [(1e3 * (work.begin - timeline.begin), 1e3 * (work.end - work.begin)) for work in timeline.busy]
        axis.broken_barh(steps, (0.1, 0.8), color="#74c476", edgecolor="white", linewidth=0.8)
        axis.set_yticks([0.5, 1.5], ["device", "host"])
        axis.set_xlim(0, 1e3 * span)
        axis.set_title(f"async_scheduling {'on' if is_async else 'off'}", loc="left", fontsize=10)
    axes[1].set_xlabel("ms")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right", fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def measure(options: argparse.Namespace, model: str) -> tuple[dict[str, Any], dict[bool, Timeline]]:
    timelines: dict[bool, Timeline] = {}
    runs: list[Run] = []
    for _ in range(options.rounds):
        for is_async in (False, True):
            run, timelines[is_async] = Engine(options, model, is_async=is_async).serve()
            runs.append(run)
            print_run(model, run)
    device_us = 1e6 * decode_seconds(MODELS[model], options.running, options.context)
    return {"device_us": round(device_us, 1), "runs": [asdict(run) for run in runs]}, timelines


def print_run(model: str, run: Run) -> None:
    parts = ", ".join(f"{part} {value:.0f} ({value / run.host_us_total:.0%})" for part, value in run.host_us.items())
    print(
        f"{model} {'on ' if run.is_async else 'off'}: device idle {run.idle_fraction:6.2%}, "
        f"step {run.step_us:.0f} us, host {run.host_us_total:.0f} us (p99 {run.host_us_p99:.0f}): {parts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--context", type=int, default=512, help="tokens of a request, on average")
    parser.add_argument("--steps", type=int, default=400, help="measured in each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/host_timeline*")
    options = parser.parse_args()
    front_ends.SILENCE_LIMIT_S = float("inf")  # engine and client clocks differ
    environment = record.environment("numpy", "torch", "pyzmq", "msgspec")
    results = {}
    for model in options.model:
        results[model], timelines = measure(options, model)
        if options.save:
            title = f"{model}, {options.running} running at {options.context} tokens: {SHOWN_STEPS} steps"
            plot(timelines, title, record.RESULTS / f"host_timeline_{model}.png")
    if options.save:
        settings = {name: getattr(options, name) for name in ("running", "context", "steps", "rounds", "clock")}
        facts = {**environment, "load": os.getloadavg(), "device": asdict(H200), "settings": settings, "parts": PARTS}
        print(record.save("host_timeline", {**facts, "models": results}))


if __name__ == "__main__":
    main()
