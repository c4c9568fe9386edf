"""One engine in its own process, run as a file: `PYTHON offline_run.py ENGINE OPTIONS_JSON`.

Options: model (a folder), requests (a file of [[input ids, output tokens], …]), repeats, device, max_model_len.
Prints one JSON line. Greedy, end of sequence ignored, no text. Imports only the standard library and the engine, so
any environment with the engine can run it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Work = list[tuple[list[int], int]]
Run = Callable[[Work], list[list[int]]]
WARM_UP = (8, 32)  # requests, tokens
MAX_NUM_SEQS = 256


def tidewheel(options: dict[str, Any]) -> Run:
    from tidewheel import LLM, SamplingParams

    llm = LLM(
        options["model"], skip_tokenizer_init=True, dtype="bfloat16", device=options["device"],
        max_num_seqs=MAX_NUM_SEQS, max_model_len=options["max_model_len"], max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )  # fmt: skip

    def run(work: Work) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in work]
        results = llm.generate([{"input_ids": ids} for ids, _ in work], params, use_tqdm=False)
        return [list(result.token_ids) for result in results]

    return run


def vllm(options: dict[str, Any], **settings: Any) -> Run:
    # Its sampler of top-k and top-p imports FlashInfer, which a bundle lacks; these runs are greedy.
    os.environ.update(
        VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0"
    )  # fmt: skip
    from vllm import LLM, SamplingParams

    llm = LLM(
        options["model"], dtype="bfloat16", max_model_len=options["max_model_len"], max_num_seqs=MAX_NUM_SEQS,
        enable_prefix_caching=False, skip_tokenizer_init=True, disable_log_stats=True, gpu_memory_utilization=0.85,
        **settings,
    )  # fmt: skip

    def run(work: Work) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False) for _, count in work
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in work], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


def vllm_triton(options: dict[str, Any]) -> Run:
    """Use attention in triton-lang, like Tidewheel's."""
    return vllm(options, attention_backend="TRITON_ATTN")


def sglang(options: dict[str, Any]) -> Run:
    import sglang as library

    engine = library.Engine(
        model_path=options["model"], dtype="bfloat16", skip_tokenizer_init=True, log_level="error",
        context_length=options["max_model_len"], disable_radix_cache=True, attention_backend="triton",
        sampling_backend="pytorch", cuda_graph_max_bs=MAX_NUM_SEQS, mem_fraction_static=0.8,
    )  # fmt: skip

    def run(work: Work) -> list[list[int]]:
        params = [{"temperature": 0.0, "ignore_eos": True, "max_new_tokens": count} for _, count in work]
        answers = engine.generate(input_ids=[ids for ids, _ in work], sampling_params=params)
        return [list(answer["output_ids"]) for answer in answers]

    return run


def lmdeploy(options: dict[str, Any]) -> Run:
    """Use the PyTorch engine, with kernels in triton-lang."""
    import asyncio

    from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline

    settings = PytorchEngineConfig(
        dtype="bfloat16", session_len=options["max_model_len"], max_batch_size=MAX_NUM_SEQS,
        max_prefill_token_num=8192, cache_max_entry_count=0.8,
    )  # fmt: skip
    engine = pipeline(options["model"], backend_config=settings, log_level="ERROR")

    async def one(ids: list[int], count: int) -> list[int]:
        tokens: list[int] = []
        generation = GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        async for piece in engine.generate(None, engine.session(), input_ids=ids, gen_config=generation):
            tokens += piece.token_ids or []
        return tokens

    async def every(work: Work) -> list[list[int]]:
        return await asyncio.gather(*(one(ids, count) for ids, count in work))

    def run(work: Work) -> list[list[int]]:
        return asyncio.run_coroutine_threadsafe(every(work), engine.internal_thread.loop).result()

    return run


def transformers(options: dict[str, Any], attention: str = "paged|sdpa") -> Run:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=torch.bfloat16, attn_implementation=attention
    )
    model = model.to(options["device"]).eval()
    wanted: dict[str, Any] = {"num_blocks": 1024, "block_size": 32, "page_size": 32, "max_batch_tokens": 512}
    if options["device"] == "cuda":
        wanted = {"max_batch_tokens": 8192, "max_requests_per_batch": MAX_NUM_SEQS, "max_memory_percent": 0.8}
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    if "page_size" in names:
        wanted.pop("block_size", None)
    sizes = {key: value for key, value in wanted.items() if key in names}
    make_generation: Any = GenerationConfig

    def run(work: Work) -> list[list[int]]:
        longest = max(count for _, count in work)
        generation = make_generation(
            do_sample=False, max_new_tokens=longest, eos_token_id=-1, pad_token_id=0, bos_token_id=1
        )
        batching = ContinuousBatchingConfig(**sizes)
        results: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
        ) as manager:
            ids = [manager.add_request(ids, max_new_tokens=count, eos_token_id=-1) for ids, count in work]
            while len(results) < len(ids):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("generate_batch stopped before it was done")
                if result is not None and result.is_finished():
                    results[result.request_id] = list(result.generated_tokens)
        return [results[request_id] for request_id in ids]

    return run


def transformers_fa3(options: dict[str, Any]) -> Run:
    return transformers(options, "paged|flash_attention_3")


ENGINES: dict[str, Callable[[dict[str, Any]], Run]] = {
    "tidewheel": tidewheel,
    "vllm": vllm,
    "vllm-triton": vllm_triton,
    "lmdeploy": lmdeploy,
    "sglang-triton": sglang,
    "transformers": transformers,
    "transformers-fa3": transformers_fa3,
}


def measure(options: dict[str, Any], make: Callable[[dict[str, Any]], Run]) -> dict[str, Any]:
    work: Work = [(list(ids), count) for ids, count in json.loads(Path(options["requests"]).read_text())]
    start = time.perf_counter()
    run = make(options)
    load_s = time.perf_counter() - start
    run([(ids, min(count, WARM_UP[1])) for ids, count in work[: WARM_UP[0]]])
    seconds: list[float] = []
    outputs: list[list[int]] = []
    for _ in range(options["repeats"]):
        start = time.perf_counter()
        outputs = run(work)
        seconds.append(time.perf_counter() - start)
    right = sum(len(output) == count for output, (_, count) in zip(outputs, work, strict=True))
    num_tokens = sum(map(len, outputs))
    head = [output[:8] for output in outputs[:8]]
    return {
        "seconds": seconds, "num_tokens": num_tokens, "of_right_length": right, "load_s": load_s, "head": head
    }  # fmt: skip


def main() -> None:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    # Libraries print to standard output.
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    output.write(json.dumps(measure(options, ENGINES[name])) + "\n")
    output.flush()
    os._exit(0)  # despite the engine's threads and processes


if __name__ == "__main__":
    main()
