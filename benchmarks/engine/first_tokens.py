"""Time to the first token on a CPU of many prompts at once, beside other engines and another checkout, in turns.

    python benchmarks first_tokens build/qwen3-40m --openvino ENV/bin/python,EXPORTED --against DIR --save

All engines are loaded, each in a process, and one works at a time. Prompts are random ids and never repeat, so
nothing of them is cached.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.study import BUILD, ROOT, Study, commit_of, in_turns, summary
from tidewheel.bench import peer_engines
from tidewheel.bench.worker_process import WorkerProcess

LIMIT_S = 300.0
FIRST_ID, LAST_ID = 4, 31_000


class Run(NamedTuple):
    first_s: float  # median over requests of the time to the first token
    last_first_s: float
    seconds: float  # to the last token


def commands(options: Any) -> Iterator[tuple[str, list[str], dict[str, str], dict[str, object]]]:
    """Yield name, command, environment and options of each engine."""
    common = {"dtype": options.dtype, "threads": options.threads, "max_num_seqs": options.requests}
    ours = {**common, "model": str(options.model), "max_model_len": 1024}
    for name, checkout in (("tidewheel", ROOT), ("before", options.against)):
        if checkout is not None:
            folders = [str(checkout.resolve() / part) for part in ("backend", "kernels", "client", "process")]
            yield name, [sys.executable, "llm"], {"PYTHONPATH": os.pathsep.join(folders)}, ours
    if options.openvino:
        python, _, exported = options.openvino.partition(",")
        yield "openvino", [python, "openvino"], {}, {**common, "model": exported}
    if options.vllm:
        yield "vllm", [options.vllm, "vllm"], {}, ours


def start(name: str, command: list[str], environment: dict[str, str], of_engine: dict[str, object]) -> WorkerProcess:
    python, kind = command
    return WorkerProcess(
        name,
        [python, str(Path(peer_engines.__file__)), kind, json.dumps(of_engine)],
        BUILD / f"first_tokens_{name}.log",
        environment,
    )


def run(worker: WorkerProcess, prompts: list[list[int]], num_output: int) -> Run:
    began = time.monotonic()
    for number, prompt in enumerate(prompts):
        worker.send({"id": number, "input_ids": prompt, "max_tokens": num_output})
    first: dict[int, float] = {}
    num_done = 0
    while num_done < len(prompts):
        events = worker.receive(LIMIT_S)
        now = time.monotonic() - began
        for number, count, is_done in events:
            if count:
                first.setdefault(number, now)
            num_done += is_done
    return Run(statistics.median(first.values()), max(first.values()), time.monotonic() - began)


def main() -> None:
    study = Study("first_tokens", __doc__, "torch", "numpy")
    study.add_argument("model", type=Path)
    study.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    study.add_argument("--requests", type=int, default=64)
    study.add_argument("--prompt", type=int, default=300, help="tokens")
    study.add_argument("--output", type=int, default=16, help="tokens")
    study.add_argument("--threads", type=int, default=os.cpu_count())
    study.add_argument("--rounds", type=int, default=7)
    study.add_argument("--openvino", metavar="PYTHON,EXPORTED")
    study.add_argument("--vllm", metavar="PYTHON")
    study.add_argument("--against", type=Path, metavar="DIR", help="another checkout")
    options = study.begin()
    generator = np.random.default_rng(0)

    def prompts() -> list[list[int]]:
        return generator.integers(FIRST_ID, LAST_ID, (options.requests, options.prompt)).tolist()

    with ExitStack() as stack:
        workers = {name: stack.enter_context(start(name, *rest)) for name, *rest in commands(options)}
        versions = {name: worker.receive(LIMIT_S)["versions"] for name, worker in workers.items()}
        runs = {
            name: lambda worker=worker: run(worker, prompts(), options.output) for name, worker in workers.items()
        }
        taken = in_turns(runs, options.rounds)
    results = {
        name: {field: summary([round(getattr(one, field), 4) for one in of_name]) for field in Run._fields}
        for name, of_name in taken.items()
    }
    ours = results["tidewheel"]
    ratios = {
        name: {field: round(ours[field]["median"] / figure["median"], 3) for field, figure in figures.items()}
        for name, figures in results.items()
    }
    for name, figures in results.items():
        medians = ", ".join(f"{field} {figure['median']:.3f}" for field, figure in figures.items())
        print(f"{name}: {medians}; tidewheel over it: {ratios[name]}")
    commits = {"against": commit_of(options.against)} if options.against is not None else {}
    study.save({"peers": versions, "commits": commits, "ratios": ratios, "results": results})


if __name__ == "__main__":
    main()
