"""Tokens a second through Triton from a device that is a formula, and the CPU time of each process on the way.

    python benchmarks stream_path --save
    python benchmarks stream_path --streams 32 256 --step-ms 3.88 --json
    python benchmarks stream_path --streams 256 --step-ms 3.88 --against DIR
    python benchmarks stream_path --streams 256 --step-ms 3.88 --hogs 1 --hog-nice 0 --rounds 5

Engine process, front end and server are real (`modelled/engine.py`), and so is their traffic with a client process,
which only counts (`stream_readers.py`). Without `--step-ms`, steps take the time of `roofline.py`, and none (the
ceiling of the path). *alone* is the same engine in one process, without a way for its tokens. `--against` compares
another checkout, in turns. `--hogs` measures each server on a quiet machine and beside busy processes, in turns:
*of_quiet* is the rate beside them by the quiet rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.busy_processes import busy_processes
from common.random_model import without_weights
from common.serving import Address, free_ports, served
from common.stream_readers import Asked, Received, read_streams
from common.study import ROOT, Study, commit_of, in_turns, run_in, show, summary
from modelled.engine import STEP, load, modelled
from modelled.roofline import SHAPES, decode_seconds
from tidewheel.batch import StepOutputs
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler, engine_info
from tidewheel.engine.core import EngineCore
from tidewheel.request import Request
from tidewheel.sampling import SamplingParams
from tidewheel_process.process_tree import descendants

MODELS = ("qwen3-0.6b", "qwen3-8b")
CONTEXT = 512
START_LIMIT_S = 120.0
SETTLE_S = 1.0
TICKS = os.sysconf("SC_CLK_TCK")
TOKENS_OF_A_STREAM = 1 << 13
PROCESSES = ("engine", "front_end", "server", "client")


class Case(NamedTuple):
    streams: int
    transport: str
    step_ms: float
    name: str


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for transport, streams in itertools.product(options.transport, options.streams):
        if options.step_ms is not None:
            yield Case(streams, transport, options.step_ms, "given")
            continue
        for model in MODELS:
            yield Case(streams, transport, round(1e3 * decode_seconds(SHAPES[model], streams, CONTEXT), 3), model)
        yield Case(streams, transport, 0.0, "ceiling")


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    os.environ |= modelled(case.step_ms / 1e3)
    settings = {"max_num_seqs": case.streams, "max_num_batched_tokens": 8192, "default_max_tokens": "context"}
    for setting in options.set:
        key, _, settings[key] = setting.partition("=")
    with tempfile.TemporaryDirectory() as folder:
        model = without_weights(Path(folder) / "modelled", replace(SHAPES["tiny"], vocab=64))
        with served(model, settings, ports=free_ports(4), arguments=("--allow-faults",)) as address:
            windows = run_clients(case, address, options)
    quiet = [row_of(case, *window) for window in windows[:: 2 if options.hogs else 1]]
    row = middle(quiet)
    if options.hogs:
        busy = middle([row_of(case, *window) for window in windows[1::2]])
        row["beside_hogs"] = {"of_quiet": round(busy["tokens_per_s"] / max(row["tokens_per_s"], 1), 3), **busy}
    return row


def middle(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of the median rate."""
    return sorted(rows, key=lambda row: row["tokens_per_s"])[len(rows) // 2]


def run_clients(case: Case, address: Address, options: argparse.Namespace) -> list[tuple[Received, dict[str, float]]]:
    """Return a window, or with hogs pairs of a quiet and a busy window."""
    asked = Asked(address.http if case.transport == "http" else address.grpc, address.model, TOKENS_OF_A_STREAM)
    with reading(case, asked) as (client, pipe):
        if not pipe.poll(START_LIMIT_S):
            raise RuntimeError(f"not all of {case.streams} streams flow after {START_LIMIT_S:g} s")
        pipe.recv()
        pids = processes() | {"client": [client]}
        windows = []
        for number in range(2 * options.rounds if options.hogs else 1):
            with busy_processes(options.hogs if number % 2 else 0, options.hog_nice):
                time.sleep(SETTLE_S)
                windows.append(window(pipe, pids, options.seconds))
        pipe.send("end")
        pipe.recv()
        return windows


def window(pipe: Connection, pids: Mapping[str, list[int]], seconds: float) -> tuple[Received, dict[str, float]]:
    before = cpu_seconds(pids)
    pipe.send("begin")
    time.sleep(seconds)
    after = cpu_seconds(pids)
    pipe.send("report")
    return pipe.recv(), {name: after[name] - before[name] for name in PROCESSES}


@contextmanager
def reading(case: Case, asked: Asked) -> Iterator[tuple[int, Connection]]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=read_streams, args=(asked, case.transport, case.streams, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield process.pid, pipe
    finally:
        process.kill()
        process.join()


def processes() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in PROCESSES}
    for process in descendants(os.getpid()):
        command = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        if "--engine-dir" in command:
            found["engine"].append(process.pid)
        elif process.name().startswith("triton_python_b"):
            found["front_end"].append(process.pid)
        elif process.name() == "tritonserver":
            found["server"].append(process.pid)
    return found


def cpu_seconds(pids: Mapping[str, list[int]]) -> dict[str, float]:
    return {name: sum(map(cpu_of, of_name)) for name, of_name in pids.items()}


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def row_of(case: Case, received: Received, cpu: Mapping[str, float]) -> dict[str, Any]:
    num_responses, num_tokens = len(received.gaps_ms), max(received.num_tokens, 1)
    return {
        **case._asdict(),
        "tokens_per_s": round(received.num_tokens / received.seconds),
        "of_device": round(received.num_tokens / received.seconds * case.step_ms / 1e3 / case.streams, 3),
        "responses_per_s": round(num_responses / received.seconds),
        "tokens_per_response": round(received.num_tokens / max(num_responses, 1), 2),
        "gap_ms": {f"p{q}": round(float(np.percentile(received.gaps_ms or [0], q)), 2) for q in (50, 99)},
        "cpu_us_per_token": {name: round(1e6 * cpu[name] / num_tokens, 2) for name in PROCESSES},
        "cpu_us_per_response": {name: round(1e6 * cpu[name] / max(num_responses, 1), 1) for name in PROCESSES},
    }


def alone(case: Case, seconds: float) -> float:
    """Return tokens a second of the engine in this process."""
    os.environ[STEP] = str(case.step_ms / 1e3)
    config = EngineConfig(model="modelled", max_num_seqs=case.streams, max_num_batched_tokens=8192)
    runner = load(config)
    info = engine_info(runner.info, config)
    num_tokens = 0

    def count(outputs: StepOutputs) -> None:
        nonlocal num_tokens
        num_tokens += len(outputs.token_ids)

    core = EngineCore(build_scheduler(config, info), runner, count)
    sampling = SamplingParams(max_tokens=info.max_model_len - 3, ignore_eos=True)
    for number in range(case.streams):
        prompt = np.array([5, 6, 7], np.int32)
        core.add_group([Request(str(number), prompt, sampling, max_tokens=info.max_model_len - 3, arrival_time=0.0)])
    while num_tokens < 10 * case.streams:
        core.step()
    before, begin = num_tokens, time.monotonic()
    while time.monotonic() < begin + seconds and core.has_unfinished:
        core.step()
    return (num_tokens - before) / (time.monotonic() - begin)


def run_here(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [measure(case, options) for case in cases(options)]


def run_rows(checkout: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    command = ["stream_path", "--json", "--seconds", str(options.seconds), "--rounds", str(options.rounds)]
    command += ["--hogs", str(options.hogs), "--hog-nice", str(options.hog_nice)]
    for name in ("streams", "transport", "set"):
        if values := getattr(options, name):
            command += [f"--{name}", *map(str, values)]
    if options.step_ms is not None:
        command += ["--step-ms", str(options.step_ms)]
    rows: list[dict[str, Any]] = run_in(checkout, command)
    return rows


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    runs = {"against": lambda: run_rows(options.against.resolve(), options), "this": lambda: run_rows(ROOT, options)}
    rounds = in_turns(runs, options.rounds, warm_up=0)
    found = []
    for index, case in enumerate(cases(options)):
        rows = {side: [rows[index] for rows in rounds[side]] for side in runs}
        rates = {side: summary([row["tokens_per_s"] for row in rows[side]]) for side in runs}
        ratio = rates["this"]["median"] / rates["against"]["median"]
        found.append({**case._asdict(), "tokens_per_s": {**rates, "ratio": round(ratio, 3)}, "samples": rows})
    return found


def flat(row: Mapping[str, Any]) -> dict[str, object]:
    """Return a row of a table."""
    cells: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            cells |= {f"{name} {part}": of_part for part, of_part in flat(value).items()}
        else:
            cells[name] = value
    return cells


def show_compared(found: list[dict[str, Any]]) -> None:
    show({"side": side, **flat(row)} for case in found for side, rows in case["samples"].items() for row in rows)
    for case in found:
        ratio = case["tokens_per_s"]["ratio"]
        print(f"{case['streams']} streams, {case['step_ms']:g} ms: {ratio} times the tokens/s")


def main() -> None:
    study = Study("stream_path", __doc__, "numpy", "tritonclient", "pyzmq", "tokenizers")
    study.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256, 1024])
    study.add_argument("--transport", nargs="+", choices=["grpc", "http"], default=["grpc"])
    study.add_argument("--step-ms", type=float, help="of every step (default: of models, and 0)")
    study.add_argument("--seconds", type=float, default=5.0, help="of a run")
    study.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the model")
    study.add_argument("--against", type=Path, metavar="DIR", help="another checkout, to be compared with this one")
    study.add_argument("--rounds", type=int, default=3, help="of a comparison, or with hogs (default: %(default)s)")
    study.add_argument("--hogs", type=int, default=0, help="processes that compute beside the server all the time")
    study.add_argument("--hog-nice", type=int, default=0, help="their nice value (default: %(default)s)")
    study.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = study.begin()
    if options.against is not None:
        found = compare(options)
        show_compared(found)
        commits = {"this": commit_of(ROOT), "against": commit_of(options.against)}
        study.save({"rounds": options.rounds, "commits": commits, "cases": found}, "stream_path_comparison")
        return
    rows = run_here(options)
    if options.json:
        print(json.dumps(rows))
        return
    rows = [{**row, "alone_tokens_per_s": round(alone(Case(*(row[f] for f in Case._fields)), 2.0))} for row in rows]
    show(map(flat, rows))
    study.save({"seconds": options.seconds, "rows": rows})


if __name__ == "__main__":
    main()
