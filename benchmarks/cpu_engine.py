"""Output tokens/s on CPU: the engine alone, through Triton, and transformers.

    python benchmarks/cpu_engine.py                 64 mixed-length requests, 40M-parameter Qwen3 shape, greedy
    python benchmarks/cpu_engine.py --repeats 5 --save

Targets take turns, so machine drift hits all alike. Weights are random; ids and output lengths are equal, ends of
sequence are ignored, and every token counts once.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import record
from random_model import SHAPES, make_model
from serving import served
from tidewheel import LLM, SamplingParams
from tidewheel_client import Client
from transformers_peers import GenerateBatch, StaticBatches
from workload import WorkItem, mixed_lengths

Run = Callable[[list[WorkItem]], list[list[int]]]


class Target(NamedTuple):
    name: str
    run: Run


def in_process(folder: Path, dtype: str, threads: int) -> Target:
    llm = LLM(str(folder), dtype=dtype, num_threads=threads, skip_tokenizer_init=True, max_model_len=512)

    def run(work: list[WorkItem]) -> list[list[int]]:
        prompts = [{"input_ids": item.input_ids} for item in work]
        params = [
            SamplingParams(temperature=0.0, max_tokens=item.num_output_tokens, ignore_eos=True) for item in work
        ]
        return [list(result.token_ids) for result in llm.generate(prompts, params, use_tqdm=False)]

    return Target("tidewheel engine", run)


@contextmanager
def through_triton(folder: Path, dtype: str, threads: int) -> Iterator[Target]:
    settings = {"dtype": dtype, "num_threads": threads, "max_model_len": 512}
    with served(folder, settings) as address, Client(address.grpc, model=address.model) as client:

        def one(item: WorkItem) -> list[int]:
            chunks = client.stream(
                input_ids=item.input_ids,
                max_tokens=item.num_output_tokens,
                temperature=0.0,
                ignore_eos=True,
                return_token_ids=True,
            )
            return [token for chunk in chunks for token in chunk.token_ids]

        def run(work: list[WorkItem]) -> list[list[int]]:
            with ThreadPoolExecutor(len(work)) as pool:
                return list(pool.map(one, work))

        yield Target("tidewheel through Triton", run)


def measure(target: Target, work: list[WorkItem]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    outputs = target.run(work)
    seconds = time.perf_counter() - start
    expected = [item.num_output_tokens for item in work]
    if [len(tokens) for tokens in outputs] != expected:
        raise RuntimeError(f"{target.name} gave other lengths than were asked for")
    return sum(expected) / seconds, outputs


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def compare(targets: list[Target], work: list[WorkItem], repeats: int) -> dict[str, Any]:
    warm_up = work[:8]
    for target in targets:
        target.run(warm_up)
    samples: dict[str, list[float]] = {target.name: [] for target in targets}
    outputs: dict[str, list[list[int]]] = {}
    for round_number in range(repeats):
        for target in targets:
            speed, outputs[target.name] = measure(target, work)
            samples[target.name].append(round(speed, 1))
            print(f"round {round_number + 1}  {target.name:32s} {speed:8.1f} tokens/s", flush=True)
    first = targets[0].name
    return {
        name: {**record.summary(values), "same_tokens_as_engine": agreement(outputs[first], outputs[name])}
        for name, values in samples.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-40m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cpu_engine.json")
    arguments = parser.parse_args()
    environment = record.environment("torch", "transformers", "tritonclient", "numpy")
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    work = mixed_lengths(arguments.requests, (16, 128), (16, 128))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = make_model(Path(scratch) / arguments.shape, SHAPES[arguments.shape], dtype)
        targets = [
            in_process(folder, arguments.dtype, arguments.threads),
            stack.enter_context(through_triton(folder, arguments.dtype, arguments.threads)),
        ]
        peers = (StaticBatches(folder, dtype), GenerateBatch(folder, dtype))
        targets += [Target(peer.name, peer.run) for peer in peers]
        results = compare(targets, work, arguments.repeats)
    ours = results["tidewheel engine"]["median"]
    ratios = {name: round(ours / result["median"], 3) for name, result in results.items()}
    print("engine over …  " + "  ".join(f"{name}: {ratio:.2f}x" for name, ratio in ratios.items()))
    if arguments.save:
        workload = {"requests": arguments.requests, "input": [16, 128], "output": [16, 128], "seed": 0}
        path = record.save(
            "cpu_engine",
            {
                **environment,
                "workload": {**workload, "shape": arguments.shape, "dtype": arguments.dtype},
                "unit": "output tokens/s",
                "results": results,
                "engine_over": ratios,
            },
        )
        print(path)


if __name__ == "__main__":
    main()
