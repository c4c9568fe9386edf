"""Inputs that broke a reader once, valid ones, and small changes of these. `make fuzz` looks for others."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest

from support.fuzz.mutations import mutate
from support.fuzz.seeds import SEEDS
from support.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
FOUND = sorted(path for path in CORPUS.glob("*/*"))
MEMORY_LIMIT = 16 << 20  # bytes: inputs are small, and nothing may be allocated because they claim it
NUM_CHANGED = 150
# A child process for each input, or imports of seconds.
NUM_OF = {"gguf": 50, "gguf_values": 50, "tokenizer": 15, "chat_template": 50, "config_pbtxt": 50}


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_broke_a_reader_is_refused_or_read(path: Path) -> None:
    target, data = TARGETS[path.parent.name], path.read_bytes()
    target(data)
    tracemalloc.start()
    target(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MEMORY_LIMIT


@pytest.mark.parametrize("name", TARGETS)
def test_changes_of_valid_inputs_give_documented_errors(name: str) -> None:
    rng = random.Random(name)
    for _ in range(NUM_OF.get(name, NUM_CHANGED)):
        data = mutate(rng.choice(SEEDS[name]), TARGETS[name].form, rng)
        try:
            TARGETS[name](data)
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}\nby {data[:2000]!r}")


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_valid_inputs_are_read(name: str) -> None:
    messages = [TARGETS[name](seed) for seed in SEEDS[name]]
    assert "" in messages


def test_every_folder_of_the_corpus_has_a_target() -> None:
    assert {path.parent.name for path in FOUND} <= set(TARGETS)
    assert SEEDS.keys() == TARGETS.keys()
