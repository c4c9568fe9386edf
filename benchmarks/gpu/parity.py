"""Greedy tokens of the engine beside those of transformers, on the same weights."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.random_model import make_model
from common.work_items import of_length
from gpu.engine_steps import open_engine
from gpu.measurements import Measurement
from gpu.stage import Stage, parser, run
from gpu.suite import TINY
from modelled.roofline import SHAPES, Shape

NEEDS_S = 20.0
WRONG_SPACINGS = 64.0  # rounding explains no such difference
NUM_PROMPTS, NUM_TOKENS = 8, 64
# Compiles the kernels that Qwen3-0.6B needs.
PARITY_SHAPE = Shape(1024, 4, 3072, 16, 8, 128, 32_000, True, True, 1e6)


class Divergence(NamedTuple):
    """First token that is not the reference's best."""

    position: int
    gap: float  # best logit less the token's
    spacing: float  # of the dtype at the best logit

    @property
    def spacings(self) -> float:
        return self.gap / self.spacing


def first_divergence(logits: torch.Tensor, tokens: list[int], dtype: torch.dtype) -> Divergence | None:
    """Compare with reference `logits` [len(tokens), V] float32 for the same tokens."""
    best = logits.max(dim=-1).values
    chosen = logits.gather(-1, torch.tensor(tokens, device=logits.device).unsqueeze(-1)).squeeze(-1)
    behind = (best - chosen).tolist()
    position = next((i for i, gap in enumerate(behind) if gap > 0), None)
    if position is None:
        return None
    exponent = math.floor(math.log2(max(abs(float(best[position])), 1e-30)))
    return Divergence(position, behind[position], torch.finfo(dtype).eps * 2.0**exponent)


def body(stage: Stage) -> None:
    for dtype in stage.options.dtypes.split(","):
        with stage.part(f"parity with transformers, {dtype}"):
            stage.check_time(NEEDS_S)
            parity(stage, dtype)


def parity(stage: Stage, dtype_name: str) -> None:
    """Check the engine's greedy tokens by transformers' logits for the same tokens."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, dtype_name)
    shape = SHAPES[TINY] if stage.is_dry else PARITY_SHAPE
    num_tokens = 8 if stage.is_dry else NUM_TOKENS
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch), shape, dtype)
        lengths = [13 + 29 * number for number in range(2 if stage.is_dry else NUM_PROMPTS)]
        work = [of_length(1, length, num_tokens, shape.vocab, seed=length)[0] for length in lengths]
        settings = {"load_format": "auto", "dtype": dtype_name, "max_model_len": 512, "gpu_memory_utilization": 0.3}
        with open_engine(stage, "parity", folder, **settings) as engine:
            answers = engine.greedy(work)
        reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        reference = reference.to(stage.device).eval()
        found: list[Divergence | None] = []
        with torch.inference_mode():
            for item, tokens in zip(work, answers, strict=True):
                ids = torch.tensor([item.input_ids + tokens[:-1]], device=stage.device)
                logits = reference(input_ids=ids).logits[0, len(item.input_ids) - 1 :].float()
                found.append(first_divergence(logits, tokens, dtype))
    divergences = [one for one in found if one is not None]
    measured = Measurement(
        name="parity with transformers",
        case=f"greedy, {dtype_name}, {len(work)} prompts of {num_tokens} tokens",
        value=float(len(work) - len(divergences)),
        unit=f"of {len(work)} token for token",
        samples=[one.spacings for one in divergences],
        sample_unit=f"{dtype_name} spacings between the two logits at the first divergence",
        details={"dtype": dtype_name, "divergences": [one._asdict() for one in divergences]},
    )
    stage.result(measured)
    worst = max((one.spacings for one in divergences), default=0.0)
    if not worst < WRONG_SPACINGS:
        raise RuntimeError(f"wrong answers: a logit is {worst:.0f} spacings of {dtype_name} below the best one")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    made = parser(__doc__)
    made.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated (default: %(default)s)")
    run("parity", body, made.parse_args())
