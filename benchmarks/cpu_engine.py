"""Output tokens/s on CPU: the engine alone, through Triton, and transformers, in turns.

    python benchmarks/cpu_engine.py --repeats 5 --save

Mixed-length requests on random weights, greedy; ends of sequence are ignored. transformers runs `generate` over
static batches of similar length (left padding, to the longest output), and `generate_batch`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM

from gpu import offline_run
from gpu.engine_steps import TimedLLM
from random_model import make_model
from roofline import SHAPES
from serving import served
from study import Study, in_turns, summary
from tidewheel_client import Client
from work_items import LAST_ID, WorkItem, mixed_lengths

Run = Callable[[list[WorkItem]], list[list[int]]]
BATCH_SIZE = 16  # of `generate`
PAD = 0
LENGTHS = (16, 128)


def in_process(folder: Path, dtype: str, threads: int) -> Run:
    llm = TimedLLM(str(folder), dtype=dtype, num_threads=threads, skip_tokenizer_init=True, max_model_len=512)
    llm.deliveries = []
    return llm.greedy


@contextmanager
def through_triton(folder: Path, dtype: str, threads: int) -> Iterator[Run]:
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

        yield run


def static_batches(folder: Path, dtype: torch.dtype) -> Run:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()

    @torch.inference_mode()
    def batch(items: list[WorkItem]) -> list[list[int]]:
        width = max(len(item.input_ids) for item in items)
        longest = max(item.num_output_tokens for item in items)
        missing = [width - len(item.input_ids) for item in items]
        output = model.generate(
            input_ids=torch.tensor([[PAD] * n + item.input_ids for n, item in zip(missing, items, strict=True)]),
            attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in missing]),
            do_sample=False,
            max_new_tokens=longest,
            min_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        rows = output[:, width:].tolist()
        return [row[: item.num_output_tokens] for row, item in zip(rows, items, strict=True)]

    def run(work: list[WorkItem]) -> list[list[int]]:
        order = sorted(range(len(work)), key=lambda i: work[i].num_output_tokens)
        outputs: dict[int, list[int]] = {}
        for start in range(0, len(order), BATCH_SIZE):
            indices = order[start : start + BATCH_SIZE]
            outputs |= zip(indices, batch([work[i] for i in indices]), strict=True)
        return [outputs[i] for i in range(len(work))]

    return run


def generate_batch(folder: Path, dtype: str) -> Run:
    run = offline_run.transformers({"model": str(folder), "dtype": dtype, "device": "cpu"})
    return lambda work: run([(item.input_ids, item.num_output_tokens) for item in work])


class Answer(NamedTuple):
    tokens_per_s: float
    outputs: list[list[int]]


def measure(run: Run, work: list[WorkItem]) -> Answer:
    start = time.perf_counter()
    outputs = run(work)
    seconds = time.perf_counter() - start
    expected = [item.num_output_tokens for item in work]
    if [len(tokens) for tokens in outputs] != expected:
        raise RuntimeError("outputs have other lengths than were asked for")
    return Answer(round(sum(expected) / seconds, 1), outputs)


def note(number: int, name: str, answer: Answer) -> None:
    print(f"round {number}  {name:32s} {answer.tokens_per_s:8.1f} tokens/s", flush=True)


def main() -> None:
    study = Study("cpu_engine", __doc__, "torch", "transformers", "tritonclient", "numpy")
    study.add_argument("--shape", choices=SHAPES, default="qwen3-40m")
    study.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    study.add_argument("--requests", type=int, default=64)
    study.add_argument("--repeats", type=int, default=3)
    study.add_argument("--threads", type=int, default=os.cpu_count())
    options = study.begin()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    work = mixed_lengths(options.requests, LENGTHS, LENGTHS, vocab=min(LAST_ID, SHAPES[options.shape].vocab))
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / options.shape, SHAPES[options.shape], dtype)
        with through_triton(folder, options.dtype, options.threads) as served_run:
            runs = {
                "tidewheel engine": in_process(folder, options.dtype, options.threads),
                "tidewheel through Triton": served_run,
                "transformers generate": static_batches(folder, dtype),
                "transformers generate_batch": generate_batch(folder, options.dtype),
            }
            for run in runs.values():
                run(work[:8])
            timed = {name: lambda run=run: measure(run, work) for name, run in runs.items()}
            answers = in_turns(timed, options.repeats, warm_up=0, note=note)
    ours = answers["tidewheel engine"][-1].outputs
    results = {}
    for name, found in answers.items():
        same = sum(a == b for a, b in zip(ours, found[-1].outputs, strict=True)) / len(work)
        results[name] = {**summary([one.tokens_per_s for one in found]), "same_tokens_as_engine": same}
    median = results["tidewheel engine"]["median"]
    ratios = {name: round(median / result["median"], 3) for name, result in results.items()}
    print("engine over …  " + "  ".join(f"{name}: {ratio:.2f}x" for name, ratio in ratios.items()))
    workload = {"requests": options.requests, "input": LENGTHS, "output": LENGTHS, "seed": 0}
    workload |= {"shape": options.shape, "dtype": options.dtype}
    study.save({"workload": workload, "unit": "output tokens/s", "results": results, "engine_over": ratios})


if __name__ == "__main__":
    main()
