"""Predicted speed of decoding with drafts from prompt lookup on a GPU, beside the same steps without.

A row with k drafts is k + 1 decodes, each of which reads the row's keys again. A step with drafts waits for the
tokens of the step before it, so the host's time adds to the device's; without drafts the host works one step ahead.
Drafts of a row are accepted one after the other, each with the same chance. The number of drafts is the best of the
row's 0 to 8, as the engine would choose it where `max_num_seqs` leaves as many rows free as a step has drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from modelled.roofline import SHAPES
from modelled.step_model import Host, Model, Work, step_host_s
from modelled.tensor_parallel import ENDS, MACHINES

MACHINE = "H100 SXM"
MODELS = ("qwen3-0.6b", "qwen3-8b")
ROWS, CONTEXT = (1, 8, 64), 1024
CHANCES = (0.5, 0.7, 0.9)
MOST = 8


def expected_tokens(chance: float, drafts: int) -> float:
    """Return a row's expected tokens in a step (Leviathan et al. 2023, equation 1)."""
    return sum(chance**accepted for accepted in range(drafts + 1))


def speedup(model: Model, rows: int, chance: float, drafts: int, host_s: float) -> float:
    """Return tokens/s with so many drafts for each row, over tokens/s without."""
    plain = model.step(Work(rows, CONTEXT)).seconds
    drafted = model.step(Work(rows * (drafts + 1), CONTEXT)).device_s + host_s
    return expected_tokens(chance, drafts) * plain / drafted if drafts else 1.0


def predictions() -> Iterator[dict[str, Any]]:
    """Yield the best number of drafts and its speed; pairs are the slow and the fast end of every factor."""
    host_s = step_host_s("qwen3-0.6b")
    for name in MODELS:
        models = [Model(SHAPES[name], Host(host_s, 0.0, 0.0), end, device=MACHINES[MACHINE].device) for end in ENDS]
        for rows in ROWS:
            for chance in CHANCES:
                found = [
                    max((speedup(model, rows, chance, drafts, host_s), drafts) for drafts in range(MOST + 1))
                    for model in models
                ]
                yield {
                    "model": name,
                    "rows": rows,
                    "accepted": chance,
                    "drafts": [drafts for _, drafts in found],
                    "of plain": [round(speed, 2) for speed, _ in found],
                    "with 4": [round(speedup(model, rows, chance, 4, host_s), 2) for model in models],
                }
