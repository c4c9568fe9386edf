"""Kernels beside torch's and FlashAttention's, in percent of this device's ceilings."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator

import torch

from gpu import kernel_attention as attention
from gpu import kernel_rows as rows
from gpu.kernel_attention import AttentionCase
from gpu.kernel_copies import copies
from gpu.kernel_rows import RowCase
from gpu.kernel_sweep import sweep
from gpu.measurements import OURS, throughput
from gpu.stage import Stage, parser, run
from gpu.timing import Call, Timer
from roofline import SHAPES

SAMPLED_VOCAB = 151_936
LLAMA, QWEN = (32, 8), (16, 8)  # query and KV heads
PEER_DECODES = ((1, 512), (1, 8192), (32, 2048), (128, 512), (128, 2048))  # batch, context
FLEX_CASES = (AttentionCase(128, 2048), AttentionCase(1, 8192, 8192))  # seconds to compile
FLEX_NEEDS_S = 20.0
MakeAttention = Callable[[AttentionCase, torch.device], Call]


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


def row_cases(is_dry: bool) -> Iterator[RowCase]:
    models = ["tiny"] if is_dry else ["llama-3.1-8b", "qwen3-0.6b"]
    for num_tokens in (8,) if is_dry else (8192, 1, 128, 1024):
        for model in models:
            shape = SHAPES[model]
            yield rows.residual_norm(shape, num_tokens)
            yield rows.norm_rope_write(shape, num_tokens)
            yield rows.gated_activation(shape, num_tokens)


def sampling_cases(is_dry: bool) -> Iterator[RowCase]:
    vocab = 512 if is_dry else SAMPLED_VOCAB
    for batch in (2,) if is_dry else (128, 1, 32, 256):
        for sampler in rows.SAMPLERS:
            yield rows.sampling(batch, vocab, sampler)
        for num_top in (0, 5):
            yield rows.log_probabilities(batch, vocab, num_top)


class Kernels:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._timer = Timer(stage.device, is_dry=stage.is_dry)

    def attention(
        self, name: str, cases: Iterable[AttentionCase], make: MakeAttention, who: str = OURS, *, needs_s: float = 3.0
    ) -> None:
        """Report decodes by bandwidth, prompts by arithmetic."""
        stage, ceilings = self._stage, self._stage.ceilings
        for case in cases:
            with stage.part(f"{name}, {case.label}, {who}"):
                stage.check_time(needs_s)
                timing = self._timer.measure(lambda _, case=case: make(case, stage.device), case.num_bytes)
                if case.query > 1:
                    amount, unit, limit = 1e-12 * case.flops, "TFLOP/s", 1e-12 * ceilings.flops
                else:
                    amount, unit, limit = 1e-9 * case.num_bytes, "GB/s", 1e-9 * ceilings.copy_bandwidth
                stage.result(
                    throughput(name, case.label, timing.seconds, amount, unit, limit, who=who, details=timing.details)
                )
            _release(stage)

    def rows(self, cases: Iterable[RowCase]) -> None:
        stage = self._stage
        limit = 1e-9 * stage.ceilings.copy_bandwidth
        for case in cases:
            for who, make in {OURS: case.make, **case.peers}.items():
                with stage.part(f"{case.name}, {case.case}, {who}"):
                    stage.check_time(2.0)
                    timing = self._timer.measure(lambda _, make=make: make(stage.device), case.num_bytes)
                    amount, facts = 1e-9 * case.num_bytes, {"who": who, "details": timing.details}
                    stage.result(throughput(case.name, case.case, timing.seconds, amount, "GB/s", limit, **facts))
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
    kernels, is_dry = Kernels(stage), stage.is_dry
    decodes, prompts = decode_cases(is_dry), prefill_cases(is_dry)
    beside = [case for case in decodes if (case.batch, case.context) in PEER_DECODES and case.heads == LLAMA[0]]
    beside = decodes if is_dry else beside
    fa3 = attention.flash_attention_3() if stage.is_cuda else None
    kernels.attention("decode attention", decodes[:2], attention.ours)
    kernels.attention("prefill attention", prompts, attention.ours)
    if fa3 is None:
        stage.skip("FlashAttention-3", "no flash_attn_interface here; a bundle of peers brings one")
    else:
        kernels.attention("decode attention", beside, fa3, "FlashAttention-3")
        kernels.attention("prefill attention", prompts, fa3, "FlashAttention-3")
    kernels.rows(row_cases(is_dry))
    kernels.rows(sampling_cases(is_dry))
    copies(stage)
    kernels.attention("decode attention", decodes[2:], attention.ours)
    kernels.attention("decode attention", beside, attention.torch_sdpa, "torch SDPA")
    kernels.attention("prefill attention", prompts, attention.torch_sdpa, "torch SDPA")
    if stage.is_cuda:
        flex = attention.flex_attention
        kernels.attention("decode attention", FLEX_CASES[:1], flex, "FlexAttention", needs_s=FLEX_NEEDS_S)
        kernels.attention("prefill attention", FLEX_CASES[1:], flex, "FlexAttention", needs_s=FLEX_NEEDS_S)
    else:
        stage.skip("FlexAttention", "it is compared on CUDA only")


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--sweep", action="store_true", help="time alternative launch configurations instead")
    run("kernels", body, made.parse_args())
