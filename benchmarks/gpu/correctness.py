"""Correctness on the device: tests, and parity with transformers."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch

from gpu.engine_steps import open_engine
from gpu.measurements import Measurement
from gpu.stage import Stage, parser, run
from gpu.suite import TINY
from random_model import make_model
from roofline import SHAPES, Shape
from work_items import of_length

ROOT = Path(__file__).parents[2]
KERNEL_TESTS = ("tests/kernels", "-m", "not slow", "--ignore", "tests/kernels/test_aot.py")
OTHER_TESTS = ("tests/runner", "tests/engine", "tests/models", "-m", "gpu")  # others need more packages
WORKERS = 8  # of kernel tests, which compile
OTHERS_NEED_S = 30.0
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
    for dtype in ("float32", "bfloat16"):
        with stage.part(f"parity with transformers, {dtype}"):
            parity(stage, dtype)
    if stage.is_dry:
        stage.skip("pytest", "the tests run with make test; here only on CUDA")
        return
    workers = ("-n", str(WORKERS)) if importlib.util.find_spec("xdist") else ()
    with stage.part("tests of the kernels"):
        tests(stage, "tests of the kernels", (*KERNEL_TESTS, *workers), leave_s=OTHERS_NEED_S)
    with stage.part("tests marked gpu"):
        stage.check_time(0.5 * OTHERS_NEED_S)
        tests(stage, "tests marked gpu", OTHER_TESTS)


def tests(stage: Stage, name: str, arguments: tuple[str, ...], *, leave_s: float = 0.0) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "tests.xml"
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += arguments
        limit_s = max(stage.seconds_left - leave_s, 1.0)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
        if not report.is_file():
            raise RuntimeError(f"pytest wrote no report: {done.stdout[-2000:]} {done.stderr[-2000:]}")
        counts, failed = read_report(report)
    num_run = counts["tests"] - counts["skipped"]
    passed = num_run - counts["failures"] - counts["errors"]
    measured = Measurement(
        name=name,
        case=f"{counts['skipped']} skipped",
        value=float(passed),
        unit=f"of {num_run} passed",
        samples=[],
        sample_unit="",
        details={**counts, "failed": failed[:50]},
    )
    stage.result(measured)


def read_report(path: Path) -> tuple[dict[str, int], list[dict[str, str]]]:
    root = ElementTree.parse(path).getroot()
    suites = [root] if root.tag == "testsuite" else list(root.iter("testsuite"))
    keys = ("tests", "failures", "errors", "skipped")
    counts = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in keys}
    failed = []
    for test in root.iter("testcase"):
        for kind in ("failure", "error"):
            found = test.find(kind)
            if found is not None:
                message = (found.get("message") or "")[:400]
                failed.append({"test": f"{test.get('classname')}::{test.get('name')}", "message": message})
    return counts, failed


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


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run("correctness", body, parser(__doc__).parse_args())
