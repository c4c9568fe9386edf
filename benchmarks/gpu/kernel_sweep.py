"""Launch configurations beside the table's, to correct it from one run.

A function of `tidewheel_kernels.launch_config` is replaced wherever launchers imported it.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu import kernel_attention as attention
from gpu import kernel_rows as rows
from gpu.kernel_attention import AttentionCase
from gpu.kernel_copies import copy_case, largest_layout
from gpu.measurements import OURS, Measurement
from gpu.stage import Stage, is_device_lost
from gpu.timing import KernelCase, Timer
from modelled.roofline import SHAPES
from tidewheel_kernels import launch_config

RECORDED = "as recorded"


@dataclass(frozen=True, slots=True)
class Sweep:
    """`fields` are values to try in the result of `function`; "" means a plain number."""

    function: str
    case: KernelCase
    fields: Mapping[str, Sequence[int]]


def sweeps(is_dry: bool) -> Iterator[Sweep]:
    decodes = [AttentionCase(1, 8192), AttentionCase(32, 2048), AttentionCase(128, 2048), AttentionCase(256, 512)]
    prompts = [AttentionCase(1, 8192, 8192), AttentionCase(1, 1024, 1024)]
    model, num_tokens, batch, vocab = "llama-3.1-8b", 8192, 128, 151_936
    if is_dry:
        decodes = [AttentionCase(2, 64, heads=4, kv_heads=2, head_dim=16, block_size=16)]
        prompts, model, num_tokens, batch, vocab = [], "tiny", 4, 2, 512
    tiles = {"block_n": (32, 64), "num_warps": (4, 8), "num_stages": (3, 4, 5)}
    for case in decodes:
        kernel = case.by(OURS, attention.ours)
        yield Sweep("decode_config", kernel, tiles)
        yield Sweep("decode_splits", kernel, {"extra": (1, 16, 33, 66), "min_keys": (128, 256, 512, 1024, 2048)})
    for case in prompts:
        kernel = case.by(OURS, attention.ours)
        yield Sweep("prefill_config", kernel, {"tma": (0, 1)})
        yield Sweep("prefill_config", kernel, {"block_m": (64, 128), **tiles, "num_stages": (2, 3)})
    shape = SHAPES[model]
    few = {"num_warps": (1, 2, 4, 8, 16)}
    yield Sweep("row_config", rows.residual_norm(shape, num_tokens), few)
    yield Sweep("elementwise_config", rows.gated_activation(shape, num_tokens), {"block": (512, 1024, 2048), **few})
    wide = {"block_n": (64, 128, 256), "num_warps": (4, 8), "num_stages": (3, 4)}
    for count in (4,) if is_dry else (128, 2048):
        yield Sweep("linear_config", rows.down_product(shape, count), wide)
    yield Sweep("rope_config", rows.norm_rope_write(shape, num_tokens), {"block": (1, 2, 4, 8, 16), **few})
    yield Sweep("copy_config", copy_case(largest_layout(is_dry), 2 if is_dry else 256), {"num_warps": (1, 2, 4, 8)})
    yield Sweep("vocabulary_config", rows.sampling(batch, vocab, "top-p 0.9"), {"row_warps": (4, 8, 16)})


def sweep(stage: Stage) -> None:
    timer = Timer(stage.device, is_dry=stage.is_dry)
    for one in sweeps(stage.is_dry):
        with stage.part(f"sweep of {one.function}, {one.case.case}"):
            stage.check_time(10.0)
            _sweep_one(stage, timer, one)


def _sweep_one(stage: Stage, timer: Timer, one: Sweep) -> None:
    if not hasattr(launch_config, one.function):
        stage.skip(f"sweep of {one.function}", "launch_config has no such function")
        return
    make, num_bytes = one.case.makers[OURS], one.case.num_bytes
    found: dict[str, list[float]] = {RECORDED: timer.measure(lambda _: make(stage.device), num_bytes).seconds}
    refused: dict[str, str] = {}
    for values in itertools.product(*one.fields.values()):
        changes = dict(zip(one.fields, values, strict=True))
        if stage.seconds_left < 4.0:  # report what was found
            break
        label = ", ".join(f"{key or 'splits'} {value}" for key, value in changes.items())
        try:
            with replaced(one.function, changes):
                found[label] = timer.measure(lambda _: make(stage.device), num_bytes).seconds
        except UnknownField as unknown:
            stage.skip(f"sweep of {one.function}", str(unknown))
            break
        except Exception as error:  # some tiles do not fit
            if is_device_lost(error):
                raise
            refused[label] = " ".join(str(error).split())[:120] or type(error).__name__
    _report(stage, one, found, refused)


def _report(stage: Stage, one: Sweep, found: dict[str, list[float]], refused: dict[str, str]) -> None:
    medians = {label: statistics.median(seconds) for label, seconds in found.items()}
    best = min(medians, key=lambda label: medians[label])
    gain = medians[RECORDED] / medians[best]
    details = {"best": best, "median_us": {k: 1e6 * v for k, v in medians.items()}, "refused": refused}
    name, case = f"sweep {one.function}", f"{one.case.name}, {one.case.case}"
    stage.result(Measurement(name=name, case=case, value=gain, unit="x", samples=found[RECORDED], details=details))
    print(f"    best: {best} ({1e6 * medians[best]:.1f} us; recorded {1e6 * medians[RECORDED]:.1f} us)", flush=True)


class UnknownField(Exception):
    pass


@contextlib.contextmanager
def replaced(function: str, changes: Mapping[str, int]) -> Iterator[None]:
    """Change what `function` returns, in every kernel module that has it."""
    original: Callable[..., Any] = getattr(launch_config, function)

    def other(*arguments: Any, **named: Any) -> Any:
        value = original(*arguments, **named)
        if "" in changes:
            return changes[""]
        if unknown := set(changes) - set(value._fields):
            raise UnknownField(f"{type(value).__name__} has no {', '.join(sorted(unknown))}")
        return value._replace(**changes)

    modules = [module for name, module in sys.modules.items() if name.startswith("tidewheel_kernels")]
    holders = [module for module in modules if getattr(module, function, None) is original]
    for module in holders:
        setattr(module, function, other)
    try:
        yield
    finally:
        for module in holders:
            setattr(module, function, original)
