"""Fuzz by coverage: ``python -m support.fuzz.atheris_run SECONDS [TARGET]``, all targets by default. Needs atheris.

An input that breaks the target is written to build/fuzz. Its like goes into tests/fuzz/corpus, with the mend.
"""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from pathlib import Path

import atheris

from support.fuzz.mutations import mutate

MAX_BYTES = 1 << 16
INPUT_S, MEMORY_MB = 20, 4096


def fuzz_all(seconds: str) -> int:
    """Fuzz each target in a process, which the fuzzer ends. Return how many broke."""
    from support.fuzz.targets import TARGETS

    command = [sys.executable, "-m", "support.fuzz.atheris_run", seconds]
    return sum(subprocess.run([*command, name], check=False).returncode != 0 for name in TARGETS)


def fuzz(name: str, seconds: int) -> None:
    folder = Path("build/fuzz") / name
    folder.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["tidewheel"]):
        from support.fuzz.seeds import SEEDS
        from support.fuzz.targets import TARGETS

        target = TARGETS[name]
        for number, seed in enumerate(SEEDS[name]):
            (folder / f"seed-{number}").write_bytes(seed)
            target(seed)  # imports what it needs

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        changed = atheris.Mutate(data, max_size) if rng.random() < 0.2 else mutate(data, target.form, rng)
        return changed[:max_size]

    limits = [
        f"-max_total_time={seconds}",
        f"-timeout={INPUT_S}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-max_len={MAX_BYTES}",
    ]
    arguments = [sys.argv[0], *limits, f"-artifact_prefix={folder.parent}/{name}-", str(folder)]
    logging.disable()
    atheris.Setup(arguments, target, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(fuzz_all(sys.argv[1]))
    fuzz(sys.argv[2], int(sys.argv[1]))
