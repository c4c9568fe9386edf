"""An ONNX model in the engine, beside ONNX Runtime called directly, and through Triton beside its dynamic batcher.

    python benchmarks one_shot --save                                # an image classifier of random weights
    python benchmarks one_shot --model FILE.onnx --inputs FILE.npz   # another model, and tensors of one item

A batch runs in the engine's step loop and by the library alone, in turns. Through Triton, `floor` takes the same
tensors and computes nothing; `batcher` is Triton's dynamic batcher over a Python model that calls ONNX Runtime with
as many threads. Capacities are of a closed loop; both then get the same arrivals at 90 % of the lower one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime

from common.onnx_file import image_classifier
from common.serving import free_ports, serving_repository
from common.study import Study, in_turns, show, summary
from one_shot.tensor_client import Sent, TensorClient, per_second
from path.stream_path import PROCESSES, cpu_seconds, processes
from tidewheel.batch import StepOutputs
from tidewheel.bench.deploy import PLAIN_MODEL, write_plain
from tidewheel.bench.estimates import quantile
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler, engine_info
from tidewheel.engine.core import EngineCore
from tidewheel.one_shot.adapters import Adapter, load_adapter, with_kind
from tidewheel.one_shot.runner import OneShotRunner
from tidewheel.one_shot.shared_tensors import PackedTensors
from tidewheel.one_shot.signature import DTYPES, Arrays, Signature
from tidewheel.request import Request
from tidewheel.sampling import SamplingParams
from tidewheel.server.repository import write_entry

OURS, BATCHER, FLOOR = "ours", "batcher", "floor"
LOAD = 0.9
WARM_UP_S = 1.0


class EngineSteps:
    """The engine's step loop without its process."""

    def __init__(
        self, runner: OneShotRunner, config: EngineConfig, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        info = engine_info(runner.info, config)
        self._core = EngineCore(build_scheduler(config, info), runner, self._deliver)
        self.ended: list[Request] = []

    def _deliver(self, outputs: StepOutputs) -> None:
        self.ended += outputs.finished

    def seconds(self, inputs: Sequence[Arrays]) -> float:
        """Return the time of the step that runs these requests of one item each."""
        self.ended.clear()
        for number, arrays in enumerate(inputs):
            prompt = np.zeros(1, np.int32)
            request = Request(str(number), prompt, SamplingParams(max_tokens=1), max_tokens=1, inputs=arrays,
                              bucket="-", arrival_time=time.monotonic())  # fmt: skip
            self._core.add_group([request])
        began = self._clock()
        while self._core.has_unfinished:
            self._core.step()
        return self._clock() - began


def settings_of(options: argparse.Namespace, model: Path) -> dict[str, str]:
    size = str(max(*options.batches, options.max_batch))
    sizes = {"max_num_seqs": size, "max_num_batched_tokens": size}
    return {"model": str(model), "num_threads": str(options.threads), **sizes}


def one_item(signature: Signature, options: argparse.Namespace) -> Arrays:
    if options.inputs is not None:
        return dict(np.load(options.inputs))
    rng = np.random.default_rng(0)
    shapes = {spec: [1 if isinstance(dim, str) else dim for dim in spec.dims] for spec in signature.inputs}
    return {spec.name: rng.random(shape).astype(DTYPES[spec.dtype]) for spec, shape in shapes.items()}


def batch_of(signature: Signature, item: Arrays, count: int) -> Arrays:
    return {
        spec.name: item[spec.name]
        if spec.batch_axis is None
        else np.concatenate([item[spec.name]] * count, spec.batch_axis)
        for spec in signature.inputs
    }


def library(model: Path, threads: int, **entries: str) -> Callable[[Arrays], Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    for key, value in entries.items():
        options.add_session_config_entry(f"session.intra_op.{key}", value)
    session = onnxruntime.InferenceSession(str(model), options, ["CPUExecutionProvider"])
    return lambda feeds: session.run(None, dict(feeds))


def in_engine(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Return by batch size the seconds of a batch in the engine, and of the library called with one array."""
    config = EngineConfig.from_settings(with_kind(settings_of(options, model)))
    runner = OneShotRunner.load(config)
    clock = time.process_time if options.cpu_clock else time.perf_counter
    engine, signature = EngineSteps(runner, config, clock), runner.info.signature
    assert signature is not None
    item, found = one_item(signature, options), {}
    alone = {
        "direct": library(model, options.threads),
        "without spinning": library(model, options.threads, allow_spinning="0"),
    }
    for size in options.batches:
        inputs, feeds = [item] * size, batch_of(signature, item, size)
        runs = {name: lambda run=run, feeds=feeds: _seconds(run, feeds, clock) for name, run in alone.items()}
        runs["engine"] = lambda inputs=inputs: engine.seconds(inputs)
        times = in_turns(runs, options.repeats, warm_up=3)
        medians = {name: statistics.median(values) for name, values in times.items()}
        found[str(size)] = {
            **{f"{name}_s": summary(values) for name, values in times.items()},
            "ratio": medians["engine"] / medians["direct"],
        }
    return found


def _seconds(run: Callable[[Arrays], object], feeds: Arrays, clock: Callable[[], float]) -> float:
    began = clock()
    run(feeds)
    return clock() - began


class WatchedAdapter:
    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter._replace(run=self.run)
        self._run = adapter.run

    def run(self, inputs: Arrays) -> Arrays:
        self.inputs, self.outputs = inputs, self._run(inputs)
        return self.outputs


def count_copies(options: argparse.Namespace, model: Path) -> dict[str, dict[str, int]]:
    """Count the copies of a request's tensors, alone and in a batch of two, by which arrays share their memory."""
    config = EngineConfig.from_settings(with_kind(settings_of(options, model)))
    adapter, signature = load_adapter(config)
    watched, counts = WatchedAdapter(adapter), {}
    runner = OneShotRunner(watched.adapter, signature, config)
    for name, size in (("alone", 1), ("in a batch", 2)):
        sent = [PackedTensors.of(one_item(signature, options)) for _ in range(size)]  # 1: into shared memory
        engine = EngineSteps(runner, config)
        engine.seconds([packed.arrays for packed in sent])
        given = sent[0].arrays
        is_joined = not any(np.shares_memory(given[key], array) for key, array in watched.inputs.items())
        outputs = engine.ended[0].outputs
        is_cut = not any(np.shares_memory(array, watched.outputs[key]) for key, array in outputs.items())
        PackedTensors.of(outputs).discard()  # 1: into shared memory or the message
        counts[name] = {"inputs": 1 + is_joined, "outputs": 1 + is_cut}
    return counts


@contextmanager
def serving(options: argparse.Namespace, model: Path) -> Iterator[dict[str, TensorClient]]:
    settings = settings_of(options, model)
    signature = load_adapter(EngineConfig.from_settings(with_kind(settings)))[1]
    item, threads = one_item(signature, options), str(options.threads)
    settings.pop("model")
    floor = (Path(__file__).parent / "floor_model.py").read_text()
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        write_entry(repository, str(model), OURS, settings)
        for name, program in ((BATCHER, PLAIN_MODEL), (FLOOR, floor)):
            write_plain(repository / name, str(model), threads, program)
        with serving_repository(repository, OURS, ports=free_ports(4)) as address:
            yield {name: TensorClient(address.grpc, name, item) for name in (OURS, BATCHER, FLOOR)}


def one_by_one(clients: dict[str, TensorClient], options: argparse.Namespace) -> dict[str, list[float]]:
    """Return seconds of lone requests by model."""
    runs = {name: lambda client=client: client.one_by_one(options.alone) for name, client in clients.items()}
    rounds = in_turns(runs, options.rounds)
    return {name: [one.seconds for sent in found for one in sent] for name, found in rounds.items()}


class Saturation(NamedTuple):
    per_s: float
    cpu_ms: dict[str, float]  # of a request, by process


def saturated(client: TensorClient, options: argparse.Namespace) -> Saturation:
    pids = processes() | {"client": [os.getpid()]}
    before = cpu_seconds(pids)
    sent = client.in_flight(options.in_flight, options.seconds)
    after = cpu_seconds(pids)
    return Saturation(per_second(sent), {name: 1e3 * (after[name] - before[name]) / len(sent) for name in pids})


def capacities(clients: dict[str, TensorClient], options: argparse.Namespace) -> dict[str, list[Saturation]]:
    both = {name: clients[name] for name in (OURS, BATCHER)}
    for client in both.values():
        client.in_flight(options.in_flight, WARM_UP_S)
    runs = {name: lambda client=client: saturated(client, options) for name, client in both.items()}
    return in_turns(runs, options.rounds, warm_up=0)


def under_load(
    clients: dict[str, TensorClient], rate: float, options: argparse.Namespace
) -> dict[str, list[list[Sent]]]:
    numbers = {name: iter(range(options.rounds)) for name in (OURS, BATCHER)}
    runs = {
        name: lambda name=name: clients[name].poisson(rate, options.seconds, next(numbers[name])) for name in numbers
    }
    return in_turns(runs, options.rounds, warm_up=0)


def through_triton(options: argparse.Namespace, model: Path, direct_s: float) -> dict[str, Any]:
    with serving(options, model) as clients:
        alone = {name: summary(values) for name, values in one_by_one(clients, options).items()}
        saturations = capacities(clients, options)
        found = {name: [run.per_s for run in runs] for name, runs in saturations.items()}
        rate = LOAD * min(statistics.median(rates) for rates in found.values())
        loaded = under_load(clients, rate, options)
    medians = {name: values["median"] for name, values in alone.items()}
    answered = {
        name: [len(sent) / (max(one.end for one in sent) - min(one.begin for one in sent)) for sent in rounds]
        for name, rounds in loaded.items()
    }
    latencies = {name: [one.seconds for sent in rounds for one in sent] for name, rounds in loaded.items()}
    return {
        "alone_s": alone,
        "alone_over_floor": (medians[OURS] - medians[FLOOR]) / direct_s,
        "capacity_per_s": {name: summary(rates) for name, rates in found.items()},
        "capacity_ratio": ratio(found),
        "cpu_ms_of_a_request": {
            name: {process: statistics.median(run.cpu_ms[process] for run in runs) for process in PROCESSES}
            for name, runs in saturations.items()
        },
        "load_per_s": rate,
        "answered_per_s": {name: summary(rates) for name, rates in answered.items()},
        "answered_ratio": ratio(answered),
        "loaded_s": {
            name: {f"p{q}": quantile(values, q / 100) for q in (50, 99)} for name, values in latencies.items()
        },
    }


def ratio(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return ours over the batcher's, round by round."""
    return summary([ours / theirs for ours, theirs in zip(rates[OURS], rates[BATCHER], strict=True)])


def print_result(result: dict[str, Any]) -> None:
    milliseconds = {
        size: {name: 1e3 * values["median"] for name, values in row.items() if name != "ratio"}
        for size, row in result["in_engine"].items()
    }
    show(
        {
            "batch": size,
            **{f"{name.removesuffix('_s')}, ms": round(value, 3) for name, value in row.items()},
            "engine/direct (goal 1.1)": round(result["in_engine"][size]["ratio"], 3),
        }
        for size, row in milliseconds.items()
    )
    print(f"copies: {result['copies']}")
    if (triton := result.get("triton")) is None:
        return
    show(triton_row(triton, name) for name in (FLOOR, BATCHER, OURS))
    print(
        f"offered at {LOAD:.0%}: {triton['load_per_s']:.4g}/s; processes: ms of CPU time of a request at saturation\n"
        f"alone, above the floor, over direct: {triton['alone_over_floor']:.3f} (goal 1.1)\n"
        f"capacity over the batcher's: {triton['capacity_ratio']['median']:.3f} (goal 1.0)\n"
        f"answered at {LOAD:.0%} over the batcher's: {triton['answered_ratio']['median']:.3f} (goal 0.95)"
    )


def triton_row(triton: dict[str, Any], name: str) -> dict[str, object]:
    row: dict[str, object] = {"through Triton": name, "alone, ms": 1e3 * triton["alone_s"][name]["median"]}
    if name == FLOOR:
        return row | dict.fromkeys(("capacity, 1/s", "answered, 1/s", "p99, ms", *PROCESSES), "")
    row["capacity, 1/s"] = triton["capacity_per_s"][name]["median"]
    row["answered, 1/s"] = triton["answered_per_s"][name]["median"]
    row["p99, ms"] = 1e3 * triton["loaded_s"][name]["p99"]
    return row | triton["cpu_ms_of_a_request"][name]


def main() -> None:
    study = Study("one_shot", __doc__, "onnxruntime", "numpy", "nvidia-pytriton", "tritonclient")
    study.add_argument("--model", type=Path, metavar="FILE.onnx", help="default: four convolutions, 160 x 160")
    study.add_argument("--inputs", type=Path, metavar="FILE.npz", help="of one item (default: random numbers)")
    study.add_argument("--threads", type=int, default=1, help="of ONNX Runtime everywhere (default: %(default)s)")
    study.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    study.add_argument("--max-batch", type=int, default=32, help="of the engine; the batcher's is 32")
    study.add_argument("--repeats", type=int, default=30, help="of a batch in the engine")
    study.add_argument("--cpu-clock", action="store_true", help="processor time of the batches in the engine")
    study.add_argument("--alone", type=int, default=100, help="lone requests in a round")
    study.add_argument("--in-flight", type=int, default=64, help="requests at saturation")
    study.add_argument("--seconds", type=float, default=10.0, help="of a run under load")
    study.add_argument("--rounds", type=int, default=3)
    study.add_argument("--no-triton", action="store_true", help="measure in the engine alone")
    study.add_argument("--name", default="", help="of the record (default: one_shot)")
    options = study.begin()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "image.onnx" if options.model is None else options.model.resolve()
        if options.model is None:
            model.write_bytes(image_classifier())
        result: dict[str, Any] = {"model": "" if options.model is None else model.name, "threads": options.threads}
        result |= {"in_engine": in_engine(options, model), "copies": count_copies(options, model)}
        if not options.no_triton:
            direct_s = result["in_engine"][str(options.batches[0])]["direct_s"]["median"]
            result["triton"] = through_triton(options, model, direct_s)
    print_result(result)
    study.save(result, options.name)


if __name__ == "__main__":
    main()
