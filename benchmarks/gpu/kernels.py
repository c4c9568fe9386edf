"""Kernels beside torch's and FlashAttention's, in percent of this device's ceilings."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import linear

from gpu import kernel_attention as attention
from gpu import kernel_rows as rows
from gpu.kernel_attention import AttentionCase
from gpu.kernel_copies import COPIED, copy_case, largest_layout, swaps
from gpu.kernel_sweep import sweep
from gpu.measurements import OURS, throughput
from gpu.stage import Stage, parser, run
from gpu.timing import KernelCase, Timer
from modelled.roofline import SHAPES

SAMPLED_VOCAB = 151_936
LLAMA, QWEN = (32, 8), (16, 8)  # query and KV heads
PEER_DECODES = ((1, 512), (1, 8192), (32, 2048), (128, 512), (128, 2048))  # batch, context
FLEX_CASES = (AttentionCase(128, 2048), AttentionCase(1, 8192, 8192))  # seconds to compile
FLEX_NEEDS_S = 20.0
PRODUCT_TOKENS = (1, 128, 256, 2048)


def decode_cases(is_dry: bool) -> list[AttentionCase]:
    if is_dry:
        return [AttentionCase(2, 64, heads=4, kv_heads=2, head_dim=16, block_size=16)]
    first = [AttentionCase(128, 2048), AttentionCase(1, 8192)]
    every = [
        AttentionCase(batch, context, heads=heads, kv_heads=kv_heads)
        for heads, kv_heads in (LLAMA, QWEN)
        for context in (512, 2048, 8192)
        for batch in (1, 8, 32, 64, 128, 256)
    ]
    return first + [case for case in every if case not in first]


def prefill_cases(is_dry: bool) -> list[AttentionCase]:
    if is_dry:
        return [AttentionCase(1, 32, 32, heads=4, kv_heads=2, head_dim=16, block_size=16)]
    return [
        AttentionCase(1, length, length, heads=heads, kv_heads=kv_heads)
        for heads, kv_heads in (LLAMA, QWEN)
        for length in (8192, 2048, 512, 1024, 4096)
    ]


def row_cases(is_dry: bool) -> Iterator[KernelCase]:
    models = ["tiny"] if is_dry else ["llama-3.1-8b", "qwen3-0.6b"]
    for num_tokens in (8,) if is_dry else (8192, 1, 128, 1024):
        for model in models:
            shape = SHAPES[model]
            yield rows.residual_norm(shape, num_tokens)
            yield rows.norm_rope_write(shape, num_tokens)
            yield rows.gated_activation(shape, num_tokens)


def sampling_cases(is_dry: bool) -> Iterator[KernelCase]:
    vocab = 512 if is_dry else SAMPLED_VOCAB
    for batch in (2,) if is_dry else (128, 1, 32, 256):
        for sampler in rows.SAMPLERS:
            yield rows.sampling(batch, vocab, sampler)
        for num_top in (0, 5):
            yield rows.log_probabilities(batch, vocab, num_top)


def product_cases(is_dry: bool) -> Iterator[KernelCase]:
    shape = SHAPES["tiny" if is_dry else "llama-3.1-8b"]
    for num_tokens in (8,) if is_dry else (128, 1, 2048):
        yield rows.down_product(shape, num_tokens)
        if is_dry or num_tokens > rows.FEW_ROWS:
            yield rows.int8_product(shape, num_tokens)


def serving_products(models: Iterable[str], is_dry: bool) -> Iterator[KernelCase]:
    """Yield every product of the models at sizes of serving, by either library that torch can call."""
    makers = {"torch": linear} if is_dry else {"cuBLAS": linear, "cuBLASLt": rows.by_cublaslt}
    for model in models:
        for name, (inputs, outputs) in rows.products(SHAPES[model]).items():
            for num_tokens in (8,) if is_dry else PRODUCT_TOKENS:
                yield rows.product(f"{model} {name}", num_tokens, inputs, outputs, makers)


def goals(stage: Stage, run_all: Callable[[Iterable[KernelCase]], None]) -> None:
    """Measure the attentions that have goals, and products."""
    decodes, prompts = decode_cases(stage.is_dry)[:2], prefill_cases(stage.is_dry)
    chosen = [case for case in prompts if case.context in (32, 2048, 8192) and case.heads in (4, LLAMA[0])]
    run_all(case.by(OURS, attention.ours) for case in decodes + chosen)
    run_all(serving_products(stage.models, stage.is_dry))


def measure(stage: Stage, timer: Timer, cases: Iterable[KernelCase], needs_s: float = 3.0) -> None:
    for case in cases:
        amount, unit, limit = 1e-9 * case.num_bytes, "GB/s", 1e-9 * stage.ceilings.copy_bandwidth
        if case.flops:
            amount, unit, limit = 1e-12 * case.flops, "TFLOP/s", 1e-12 * stage.ceilings.flops
        for who, make in case.makers.items():
            with stage.part(f"{case.name}, {case.case}, {who}"):
                stage.check_time(needs_s)
                timing = timer.measure(lambda _, make=make: make(stage.device), case.num_bytes)
                facts = {"who": who, "details": timing.details}
                stage.result(throughput(case.name, case.case, timing.seconds, amount, unit, limit, **facts))
            _release(stage)


def _release(stage: Stage) -> None:
    gc.collect()
    if stage.is_cuda:
        torch.cuda.empty_cache()


def body(stage: Stage) -> None:
    if stage.options.sweep:
        sweep(stage)
        return
    gc.freeze()
    is_dry, run_all = stage.is_dry, partial(measure, stage, Timer(stage.device, is_dry=stage.is_dry))
    if stage.options.goals:
        goals(stage, run_all)
        return
    decodes, prompts = decode_cases(is_dry), prefill_cases(is_dry)
    beside = [case for case in decodes if (case.batch, case.context) in PEER_DECODES and case.heads == LLAMA[0]]
    beside = decodes if is_dry else beside
    fa3 = attention.flash_attention_3() if stage.is_cuda else None
    run_all(case.by(OURS, attention.ours) for case in decodes[:2] + prompts)
    run_all(replace(case, fp8=True).by(OURS, attention.ours) for case in decodes[:2] + prompts[:1])
    if fa3 is None:
        stage.skip("FlashAttention-3", "no flash_attn_interface here; a bundle of peers brings one")
    else:
        run_all(case.by("FlashAttention-3", fa3) for case in beside + prompts)
    run_all(row_cases(is_dry))
    run_all(sampling_cases(is_dry))
    run_all(product_cases(is_dry))
    run_all(serving_products(stage.models, is_dry))
    run_all(copy_case(largest_layout(is_dry), count) for count in ((2,) if is_dry else COPIED))
    swaps(stage)
    run_all(case.by(OURS, attention.ours) for case in decodes[2:])
    run_all(case.by("torch SDPA", attention.torch_sdpa) for case in beside + prompts)
    if stage.is_cuda:
        run_all((case.by("FlexAttention", attention.flex_attention) for case in FLEX_CASES), FLEX_NEEDS_S)
    else:
        stage.skip("FlexAttention", "it is compared on CUDA only")


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--goals", action="store_true", help="attentions that have goals, and products of the models")
    made.add_argument("--sweep", action="store_true", help="time alternative launch configurations instead")
    run("kernels", body, made.parse_args())
