"""Random weights of a real shape, rounded to 8 and 4 bits, in our engine and in OpenVINO GenAI, in turns.

    ENV/bin/pip install openvino-genai openvino-tokenizers optimum-intel nncf torch
    python benchmarks quantized_shape --openvino ENV/bin/python --save

The model and OpenVINO's exports are made in `build/` once; exports have optimum-intel's own choice of groups.
Requests of 32 to 64 tokens come at once, and get 48 to 64 tokens each, greedy. OpenVINO gets the better of bfloat16
and float32 between its products, by number of requests. Neither has a server. The floor is a plain read of our
weights' bytes.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common.random_model import make_model
from common.study import BUILD, Study, show
from modelled.roofline import SHAPES
from quantized.completion_streams import StreamsRun
from quantized.engine_turns import (
    Condition,
    EngineProcess,
    Turn,
    add_options,
    conditions,
    floor,
    rows,
    take_turns,
)
from tidewheel.bench.worker_process import WorkerFailed

OURS, PEER = "tidewheel", "openvino"
FORMATS = ("int8", "int4")
STREAMS = (1, 8, 32)
PRECISIONS = ("bfloat16", "float32")
PROMPT_TOKENS, OUTPUT_TOKENS, FIRST_ID = (32, 64), (48, 64), 4
BYTES_BY_FORMAT = {"int8": 1 + 2 / 32, "int4": 0.5 + 2 / 32}  # of a weight, with its share of a scale


def run(engine: EngineProcess, vocab: int, number: int, count: int, most: int = OUTPUT_TOKENS[1]) -> StreamsRun:
    chance = random.Random(f"{number} {count}")
    lengths = [chance.randint(*PROMPT_TOKENS) for _ in range(count)]
    prompts = [[chance.randrange(FIRST_ID, vocab) for _ in range(length)] for length in lengths]
    return engine.run(prompts, [min(chance.randint(*OUTPUT_TOKENS), most) for _ in range(count)])


def exported(python: str, model: Path, form: str) -> Path:
    """Return OpenVINO's folder of the model, made if it is not there."""
    folder = BUILD / f"{model.name}-openvino-{form}"
    if not (folder / "openvino_model.xml").exists():
        command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(model)]
        command += ["--task", "text-generation-with-past", "--weight-format", form, str(folder)]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"the export failed: `{python} -m pip install openvino-genai openvino-tokenizers optimum-intel`")
    return folder


def compare(model: Path, form: str, options: argparse.Namespace) -> dict[str, Any]:
    vocab = SHAPES[options.shape].vocab
    common = {"threads": options.threads, "max_num_seqs": max(options.streams)}
    settings = common | {"model": str(model), "dtype": "bfloat16", "quantization": form, "max_model_len": 256}
    settings |= {"num_blocks": 16 * max(options.streams), "enable_prefix_caching": False}
    with ExitStack() as stack:
        engine = stack.enter_context(EngineProcess(f"quantized_{form}", "llm", settings))
        peers = {
            precision: stack.enter_context(
                EngineProcess(f"openvino_{form}_{precision}", "openvino", of_peer, options.openvino)
            )
            for precision in PRECISIONS
            for of_peer in [
                common | {"model": str(exported(options.openvino, model, form)), "dtype": precision, "cache_gib": 1,
                          "enable_prefix_caching": False}
            ]
        }  # fmt: skip
        run(engine, vocab, -1, min(options.streams), 8)
        best = better(peers, vocab, options)
        figures = take_turns(dict(turns(engine, peers, best, vocab, options)), options.rounds)
        versions = engine.versions | peers[PRECISIONS[0]].versions
    lines = list(rows(figures, OURS, PEER, {}))
    show(lines)
    shape = SHAPES[options.shape]
    num_bytes = int((shape.num_layer_weights + shape.num_head_weights) * BYTES_BY_FORMAT[form])
    least = floor(num_bytes, options.threads, figures[Condition().name].get("1", {}))
    print(f"{form}: plain read of {num_bytes / 1e6:.0f} MB: {least['read_ms']} ms; share of a step: {least['share']}")
    return {"lines": lines, "floor": least, "precision": best, "versions": versions, "figures": figures}


def better(peers: Mapping[str, EngineProcess], vocab: int, options: argparse.Namespace) -> dict[int, str]:
    """Return the precision with most tokens/s by number of requests."""
    for peer in peers.values():
        run(peer, vocab, -1, min(options.streams), 8)
    rates = {
        count: {name: run(peer, vocab, 0, count, 24).figures["tokens_per_s"] for name, peer in peers.items()}
        for count in options.streams
    }
    print(rates, flush=True)
    return {count: max(of_count, key=of_count.__getitem__) for count, of_count in rates.items()}


def turns(
    engine: EngineProcess,
    peers: Mapping[str, EngineProcess],
    best: Mapping[int, str],
    vocab: int,
    options: argparse.Namespace,
) -> Iterator[tuple[Turn, Callable[[int], StreamsRun]]]:
    for condition in conditions(options):
        for count, precision in best.items():
            for name, one in ((OURS, engine), (PEER, peers[precision])):
                yield (
                    Turn(condition, count, name),
                    lambda number, one=one, count=count: run(one, vocab, number, count),
                )


def main() -> None:
    study = Study("quantized_shape", __doc__, "torch", "numpy")
    study.add_argument(
        "--openvino", metavar="PYTHON", required=True, help="that has openvino-genai and optimum-intel"
    )
    study.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    study.add_argument("--format", choices=FORMATS, nargs="+", default=list(FORMATS))
    study.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    add_options(study, rounds=2)
    options = study.begin()
    model = BUILD / options.shape
    if not (model / "model.safetensors").exists():
        make_model(model, SHAPES[options.shape])
    try:
        result = {form: compare(model, form, options) for form in options.format}
    except WorkerFailed as error:
        sys.exit(f"{error}; OpenVINO needs `{options.openvino} -m pip install openvino-genai openvino-tokenizers`")
    study.save(result, "quantized_shape_busy" if options.hogs else "")


if __name__ == "__main__":
    main()
