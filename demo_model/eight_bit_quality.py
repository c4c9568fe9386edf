"""Perplexity with keys and values, or weights, of 8 bits, and weights of 4 bits; how far the logits move.

    apt-get install python3.11-doc postgresql-doc-15
    python demo_model/eight_bit_quality.py --save                             # the demo model, on held-out text
    python demo_model/eight_bit_quality.py --model FOLDER --windows 8 --save  # integers, on pages of docs/

Windows of 1,024 tokens in float32 on a CPU, so nothing else differs. `--root` is where the packages lie
unpacked, if they are not installed. The pages are those of a fixed commit. Resident memory is what loading adds to a
process, against bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from demo_corpus import SOURCES, Source, is_validation, load_documents
from demo_folder import CONTEXT
from tidewheel.bench.environment import command_line, environment
from tidewheel.config import EngineConfig
from tidewheel.models.causal_lm import ForwardInput, no_progress
from tidewheel.models.trial_prompt import one_sequence
from tidewheel.runner.host_memory import resident_bytes
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel.runner.loading import RunnerParts, load_parts
from train_demo_model import OUT, ROOT, Corpus, Recipe, encode, training_texts, validation_rows

RECORD = ROOT / "benchmarks" / "results" / "eight_bit_quality.json"
RECORD_OF_FOLDER = RECORD.with_name("quantized_quality.json")
EXACT, CACHE, WEIGHTS = "as the files", "kv_cache_dtype fp8_e4m3", "quantization fp8"
INT8, INT4, CODES = "quantization int8", "quantization int4", "kv_cache_dtype int8"
INTEGERS = {INT8: {"quantization": "int8"}, INT4: {"quantization": "int4"}}
PAGES_OF = "f5a28b6c0e38ef5c7767e52ab85eeea8b13d13a4"
PAGES = ("clients", "scheduling", "serve", "settings")
Logits = Callable[[torch.Tensor], torch.Tensor]


class Way(NamedTuple):
    logits: Logits
    weights_bytes: int


class Moved(NamedTuple):
    """Means over the tokens of one window."""

    loss: float  # nats
    divergence: float  # nats, of the distribution from the exact one
    logits: float  # RMS of the difference over the RMS of the exact logits
    same_token: float  # share of tokens with the same largest logit


def logits_with(parts: RunnerParts, layout: CacheLayout) -> Logits:
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        count = len(tokens)
        meta, positions = one_sequence(count, layout.block_size, tokens.device), torch.arange(count)
        kv = KVTensors(layout, meta.block_tables.shape[1], tokens.device)
        return parts.model.forward(ForwardInput(tokens, positions, meta, kv.layers, positions))

    return logits


def ways(folder: Path, *, floats: bool = True) -> dict[str, Way]:
    """Return the model by its settings, with those of 8-bit `floats` or only those of integers."""
    cache, weights = {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}
    settings = {EXACT: {}, **INTEGERS, CODES: {"kv_cache_dtype": "int8"}}
    settings |= {CACHE: cache, WEIGHTS: weights, "both": {**cache, **weights}} if floats else {}
    config = {"model": str(folder), "dtype": "float32", "device": "cpu"}
    parts = {
        name: load_parts(EngineConfig.from_settings({**config, **of_name}), no_progress)
        for name, of_name in settings.items()
    }
    found = {name: Way(logits_with(one, one.layout), one.info.weights_bytes) for name, one in parts.items()}
    if floats:
        scales = parts[CACHE].layout.scales
        assert scales is not None
        ones = parts[CACHE].layout._replace(scales=torch.ones_like(scales))
        found[f"{CACHE}, scales of 1"] = found[CACHE]._replace(logits=logits_with(parts[CACHE], ones))
    return found


def moved(logits: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor) -> Moved:
    ours, theirs = logits.log_softmax(-1), exact.log_softmax(-1)
    return Moved(
        loss=-float(ours.gather(-1, targets.unsqueeze(-1)).mean()),
        divergence=float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
        logits=float(((logits - exact).square().mean() / exact.square().mean()).sqrt()),
        same_token=float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
    )


def compare(rows: torch.Tensor, ways_by: dict[str, Way]) -> dict[str, Moved]:
    """Return means over `rows` [windows, length + 1]."""
    found: dict[str, list[Moved]] = {name: [] for name in ways_by}
    for row in rows:
        exact = ways_by[EXACT].logits(row[:-1])
        for name, way in ways_by.items():
            found[name].append(moved(way.logits(row[:-1]), exact, row[1:]))
    means = {
        name: [sum(column) / len(rows) for column in zip(*of_name, strict=True)] for name, of_name in found.items()
    }
    return {name: Moved(*values) for name, values in means.items()}


def resident_with(folder: Path, settings: Mapping[str, str]) -> int:
    """Return the resident bytes of this process, with a model loaded."""
    config = {"model": str(folder), "dtype": "bfloat16", "device": "cpu", **settings}
    _parts = load_parts(EngineConfig.from_settings(config), no_progress)
    return resident_bytes(os.getpid())


def resident_over_bfloat16(folder: Path) -> dict[str, float]:
    """Return what the model takes more than the small demo model, by settings."""
    settings = ({}, *INTEGERS.values())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        before, after = (list(pool.map(resident_with, [model] * 3, settings)) for model in (OUT, folder))
    plain, *others = (more - less for more, less in zip(after, before, strict=True))
    return {name: each / plain for name, each in zip(INTEGERS, others, strict=True)}


def held_out(folder: Path, root: Path) -> Corpus:
    sources = [Source(source.package, root / source.folder.relative_to("/")) for source in SOURCES]
    documents = [document for document in load_documents(sources) if is_validation(document)]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Corpus([], encode(tokenizer, list(training_texts(documents, Recipe.seed))))


def pages_of_docs(folder: Path, length: int, limit: int) -> torch.Tensor:
    """Return windows [rows, length + 1] of pages, in tokens of the folder's tokenizer."""
    shown = ["git", "show", *(f"{PAGES_OF}:docs/{page}.md" for page in PAGES)]
    text = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tokens = torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)
    return tokens.unfold(0, length + 1, length)[:limit]


def lines(result: dict[str, Moved], ways_by: dict[str, Way]) -> Iterator[dict[str, Any]]:
    for name, values in result.items():
        perplexity, bfloat16 = math.exp(values.loss), ways_by[EXACT].weights_bytes / 2
        yield {
            "settings": name,
            "perplexity": perplexity,
            "over_exact": perplexity / math.exp(result[EXACT].loss),
            "weights_over_bfloat16": ways_by[name].weights_bytes / bfloat16,
            **values._asdict(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="in place of the demo model")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--root", type=Path, default=Path("/"))
    parser.add_argument("--save", action="store_true", help=f"write {RECORD.relative_to(ROOT)}, or quantized_quality")
    options = parser.parse_args()
    if options.model is None:
        rows, ways_by = validation_rows(held_out(OUT, options.root), CONTEXT, options.windows), ways(OUT)
    else:
        rows, ways_by = pages_of_docs(options.model, 1024, options.windows), ways(options.model, floats=False)
    with torch.inference_mode():
        result = list(lines(compare(rows, ways_by), ways_by))
    resident = {} if options.model is None else resident_over_bfloat16(options.model)
    for line in result:
        if line["settings"] in resident:
            line["resident_over_bfloat16"] = resident[line["settings"]]
        print(json.dumps(line))
    if options.save:
        facts = {**environment(("torch",)), "command": command_line("python", sys.argv)}
        shape = {"windows": len(rows), "tokens": rows[:, 1:].numel()}
        record = RECORD if options.model is None else RECORD_OF_FOLDER
        record.write_text(json.dumps({**facts, **shape, "ways": result}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
