"""Train the demo model: 2.9 M parameters, on a CPU, in about half an hour.

    apt-get install python3.11-doc postgresql-doc-15
    OMP_WAIT_POLICY=passive nice python demo_model/train_demo_model.py

Muon trains the matrices of the layers, AdamW embedding and norms. The learning rate is constant, then decays linearly
to zero; sequences have 256 tokens, at the end 1,024. The Hugging Face folder is valid from the first checkpoint on:
configuration and tokenizer are written once, `model.safetensors` is replaced atomically. The variable helps on shared
cores: on 2 busy ones, threads that sleep at a barrier trained on 3,300 tokens/s, threads that spin on 2,300.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from demo_corpus import Document, conversations, is_validation, load_documents, small_talk
from demo_folder import (
    CONTEXT,
    END_OF_TEXT,
    IM_START_ID,
    VOCAB_SIZE,
    chat_text,
    model_config,
    save_settings,
    save_weights,
    train_tokenizer,
)
from muon import Muon
from tidewheel.bench.environment import command_line, environment

ROOT = Path(__file__).parents[1]
OUT = ROOT / "model_repository" / "demo" / "1" / "weights"
RECORD = ROOT / "benchmarks" / "results" / "demo_model.json"
SMALL_TALK_COPIES = 40
Tokens = np.ndarray[Any, np.dtype[np.uint16]]


@dataclass(frozen=True)
class Recipe:
    """Settings that decide the result; training ends at `steps` or `minutes`."""

    steps: int = 3_500
    minutes: float = 40.0
    seed: int = 0
    threads: int = 2
    tokens_per_step: int = 2_048
    short_length: int = 256
    long_length: int = CONTEXT
    long_from: float = 0.85  # share of the training in short sequences
    warmup_steps: int = 50
    decay_from: float = 0.4
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    weight_decay: float = 0.05
    checkpoint_minutes: float = 2.5
    validation_windows: int = 32


class Point(NamedTuple):
    """Losses in nats a token; the training loss is over the last 100 steps."""

    step: int
    minutes: float
    train_loss: float
    validation_loss: float


class Corpus(NamedTuple):
    """Texts as token ids (uint16), each beginning with <|endoftext|>."""

    train: list[Tokens]
    validation: list[Tokens]


def training_texts(documents: list[Document], seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for document in documents:
        yield document.prose
        yield from (chat_text(messages) for messages in conversations(document, rng))


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Tokens]:
    encodings = tokenizer.encode_batch([END_OF_TEXT + text for text in texts])
    return [np.array(encoding.ids, dtype=np.uint16) for encoding in encodings]


def windows(texts: list[Tokens], length: int, rng: random.Random) -> Iterator[Tokens]:
    """Yield windows of length + 1 without end; each epoch has a new order of texts and of windows."""
    while True:
        stream = np.concatenate(rng.sample(texts, len(texts)))
        starts = list(range(rng.randrange(length), len(stream) - length, length))
        rng.shuffle(starts)
        yield from (stream[start : start + length + 1] for start in starts)


def batches(corpus: Corpus, length: int, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Yield batches [tokens_per_step / length, length + 1] of int64 ids without end."""
    source = windows(corpus.train, length, random.Random(recipe.seed + length))
    rows = max(1, recipe.tokens_per_step // length)
    while True:
        yield torch.from_numpy(np.stack([next(source) for _ in range(rows)]).astype(np.int64))


def validation_rows(corpus: Corpus, length: int, limit: int | None) -> torch.Tensor:
    """Return evenly spread windows [rows, length + 1] of the validation text."""
    stream = np.concatenate(corpus.validation)
    starts = np.arange(0, len(stream) - length, length)
    if limit is not None:
        starts = starts[:: math.ceil(len(starts) / limit)]
    return torch.from_numpy(np.stack([stream[start : start + length + 1] for start in starts]).astype(np.int64))


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows[:, :-1], use_cache=False).logits  # [rows, length, vocab]
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: torch.nn.Module, rows: torch.Tensor) -> float:
    model.eval()
    losses = [float(loss_of(model, part)) * len(part) for part in torch.split(rows, 4)]
    model.train()
    return sum(losses) / len(rows)


def make_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [param for name, param in named if param.ndim == 2 and "embed" not in name]
    others = [param for name, param in named if param.ndim != 2 or "embed" in name]
    adamw = torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    optimizers = [Muon(matrices, recipe.muon_lr, recipe.weight_decay), adamw]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def learning_rate_scale(step: int, progress: float, recipe: Recipe) -> float:
    """Return a trapezoid: linear warm-up, constant, linear decay to zero at progress 1."""
    warmup = (step + 1) / recipe.warmup_steps
    decay = (1.0 - progress) / (1.0 - recipe.decay_from)
    return max(0.0, min(1.0, warmup, decay))


class Trainer:
    def __init__(self, corpus: Corpus, out: Path, recipe: Recipe, vocab_size: int) -> None:
        torch.manual_seed(recipe.seed)
        self.model = LlamaForCausalLM(LlamaConfig(**model_config(vocab_size))).float()  # type: ignore[no-untyped-call]
        self.curve: list[Point] = []
        self.steps_done = 0
        self._corpus, self._out, self._recipe = corpus, out, recipe
        self._optimizers = make_optimizers(self.model, recipe)
        self._started = self._last_checkpoint = time.monotonic()

    def minutes(self) -> float:
        return (time.monotonic() - self._started) / 60

    def progress(self) -> float:
        return max(self.steps_done / self._recipe.steps, self.minutes() / self._recipe.minutes)

    def train(self) -> None:
        recipe = self._recipe
        short = batches(self._corpus, recipe.short_length, recipe)
        long = batches(self._corpus, recipe.long_length, recipe)
        sample = validation_rows(self._corpus, recipe.short_length, recipe.validation_windows)
        recent: deque[float] = deque(maxlen=100)
        while (progress := self.progress()) < 1.0:
            recent.append(self._step(next(long if progress >= recipe.long_from else short), progress))
            if time.monotonic() - self._last_checkpoint > 60 * recipe.checkpoint_minutes:
                self.checkpoint(statistics.fmean(recent), sample)
        self.checkpoint(statistics.fmean(recent), sample)

    def _step(self, rows: torch.Tensor, progress: float) -> float:
        loss = loss_of(self.model, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        scale = learning_rate_scale(self.steps_done, progress, self._recipe)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * scale
            optimizer.step()
            optimizer.zero_grad()
        self.steps_done += 1
        return float(loss.detach())

    def checkpoint(self, train_loss: float, sample: torch.Tensor) -> None:
        point = Point(self.steps_done, round(self.minutes(), 2), train_loss, validation_loss(self.model, sample))
        self.curve.append(point)
        save_weights(self.model, self._out)
        self._last_checkpoint = time.monotonic()
        print(
            f"step {point.step}  {point.minutes:.1f} min  train {point.train_loss:.3f}  "
            f"validation {point.validation_loss:.3f}",
            flush=True,
        )


def build_corpus(recipe: Recipe, vocab_size: int, every: int = 1) -> tuple[Tokenizer, Corpus, dict[str, Any]]:
    documents = load_documents(every=every)
    train = [document for document in documents if not is_validation(document)]
    held_out = [document for document in documents if is_validation(document)]
    train_texts = list(training_texts(train, recipe.seed))
    tokenizer = train_tokenizer(train_texts, vocab_size)
    talk = [chat_text(messages) for messages in small_talk()] * SMALL_TALK_COPIES
    validation_texts = list(training_texts(held_out, recipe.seed))
    corpus = Corpus(encode(tokenizer, train_texts + talk), encode(tokenizer, validation_texts))
    chat = sum(len(ids) for ids in corpus.train if IM_START_ID in ids)
    counts = {
        "train_documents": len(train),
        "validation_documents": len(held_out),
        "train_tokens": sum(map(len, corpus.train)),
        "validation_tokens": sum(map(len, corpus.validation)),
        "chat_share": round(chat / sum(map(len, corpus.train)), 3),
        "validation_bytes": sum(len(text.encode()) for text in validation_texts),
    }
    return tokenizer, corpus, counts


def result_of(trainer: Trainer, corpus: Corpus, counts: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    rows = {length: validation_rows(corpus, length, None) for length in (recipe.short_length, recipe.long_length)}
    final = {length: validation_loss(trainer.model, part) for length, part in rows.items()}
    bytes_per_token = counts["validation_bytes"] / counts["validation_tokens"]
    return {
        "recipe": asdict(recipe),
        "parameters": sum(param.numel() for param in trainer.model.parameters()),
        "corpus": counts,
        "steps": trainer.steps_done,
        "tokens_seen": trainer.steps_done * recipe.tokens_per_step,
        "minutes": round(trainer.minutes(), 1),
        "validation_loss": {str(length): round(loss, 4) for length, loss in final.items()},
        "validation_bits_per_byte": round(final[recipe.long_length] / math.log(2) / bytes_per_token, 4),
        "curve": [point._asdict() for point in trainer.curve],
    }


def draw_curve(curve: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot([point.step for point in curve], [point.train_loss for point in curve], label="train")
    axes.plot([point.step for point in curve], [point.validation_loss for point in curve], label="validation")
    axes.set(xlabel="step", ylabel="loss, nats per token", title="Demo model")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110, pil_kwargs={"lossless": True, "quality": 100, "method": 6})
    pyplot.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--minutes", type=float, default=Recipe.minutes)
    parser.add_argument("--threads", type=int, default=Recipe.threads)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few pages; records nothing")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    recipe = Recipe(
        steps=3 if arguments.smoke else arguments.steps,
        minutes=arguments.minutes,
        seed=arguments.seed,
        threads=arguments.threads,
    )
    torch.set_num_threads(recipe.threads)
    facts = environment(("torch", "transformers", "tokenizers", "safetensors", "numpy"))
    facts["command"] = command_line("python", sys.argv)
    tokenizer, corpus, counts = build_corpus(recipe, VOCAB_SIZE, 30 if arguments.smoke else 1)
    print(json.dumps(counts), flush=True)
    save_settings(tokenizer, arguments.out)
    trainer = Trainer(corpus, arguments.out, recipe, tokenizer.get_vocab_size())
    trainer.train()
    if not arguments.smoke:
        result = {**facts, **result_of(trainer, corpus, counts, recipe)}
        RECORD.write_text(json.dumps(result, separators=(",", ":")) + "\n")
        draw_curve(trainer.curve, RECORD.with_name("demo_model_loss.webp"))
        print(json.dumps({key: result[key] for key in ("steps", "minutes", "validation_loss")}))


if __name__ == "__main__":
    main()
