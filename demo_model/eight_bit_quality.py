"""Perplexity of the demo model on held-out text with keys and values, or weights, of 8 bits; how far its logits move.

    apt-get install python3.11-doc postgresql-doc-15
    python demo_model/eight_bit_quality.py --save

Windows of 1,024 tokens in float32 on a CPU, so nothing else differs. `--root` is where the packages lie
unpacked, if they are not installed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
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
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel.runner.loading import RunnerParts, load_parts
from train_demo_model import OUT, ROOT, Corpus, Recipe, encode, training_texts, validation_rows

RECORD = ROOT / "benchmarks" / "results" / "eight_bit_quality.json"
EXACT, CACHE, WEIGHTS = "as the files", "kv_cache_dtype fp8_e4m3", "quantization fp8"
Logits = Callable[[torch.Tensor], torch.Tensor]


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


def ways(folder: Path) -> dict[str, Logits]:
    """Return the model by its settings."""
    config = {"model": str(folder), "dtype": "float32", "device": "cpu"}
    cache, weights = {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}
    exact, of_cache, of_weights, of_both = (
        load_parts(EngineConfig.from_settings({**config, **settings}), no_progress)
        for settings in ({}, cache, weights, {**cache, **weights})
    )
    assert of_cache.layout.scales is not None
    ones = of_cache.layout._replace(scales=torch.ones_like(of_cache.layout.scales))
    return {
        EXACT: logits_with(exact, exact.layout),
        CACHE: logits_with(of_cache, of_cache.layout),
        f"{CACHE}, scales of 1": logits_with(of_cache, ones),
        WEIGHTS: logits_with(of_weights, of_weights.layout),
        "both": logits_with(of_both, of_both.layout),
    }


def moved(logits: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor) -> Moved:
    ours, theirs = logits.log_softmax(-1), exact.log_softmax(-1)
    return Moved(
        loss=-float(ours.gather(-1, targets.unsqueeze(-1)).mean()),
        divergence=float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
        logits=float(((logits - exact).square().mean() / exact.square().mean()).sqrt()),
        same_token=float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
    )


def compare(rows: torch.Tensor, logits_by: dict[str, Logits]) -> dict[str, Moved]:
    """Return means over `rows` [windows, length + 1]."""
    found: dict[str, list[Moved]] = {name: [] for name in logits_by}
    for row in rows:
        exact = logits_by[EXACT](row[:-1])
        for name, logits in logits_by.items():
            found[name].append(moved(logits(row[:-1]), exact, row[1:]))
    means = {
        name: [sum(column) / len(rows) for column in zip(*of_name, strict=True)] for name, of_name in found.items()
    }
    return {name: Moved(*values) for name, values in means.items()}


def held_out(folder: Path, root: Path) -> Corpus:
    sources = [Source(source.package, root / source.folder.relative_to("/")) for source in SOURCES]
    documents = [document for document in load_documents(sources) if is_validation(document)]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Corpus([], encode(tokenizer, list(training_texts(documents, Recipe.seed))))


def lines(result: dict[str, Moved]) -> Iterator[dict[str, Any]]:
    for name, values in result.items():
        yield {"settings": name, "perplexity": math.exp(values.loss), **values._asdict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--root", type=Path, default=Path("/"))
    parser.add_argument("--save", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    options = parser.parse_args()
    rows = validation_rows(held_out(OUT, options.root), CONTEXT, options.windows)
    with torch.inference_mode():
        result = list(lines(compare(rows, ways(OUT))))
    for line in result:
        print(json.dumps(line))
    if options.save:
        facts = {**environment(("torch",)), "command": command_line("python", sys.argv)}
        shape = {"windows": len(rows), "tokens": rows[:, 1:].numel()}
        RECORD.write_text(json.dumps({**facts, **shape, "ways": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
