"""LoRA adapters (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022) as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tidewheel.errors import TidewheelError

NO_SLOT = -1  # of rows that the base model computes


@dataclass(eq=False, slots=True)
class Lora:
    """One version of an adapter: loaded again under its name, it is another `Lora`.

    Its weights are None until a loader has read them, and again after it has dropped them. `error`: why it cannot be
    read.
    """

    name: str
    version: int  # unique in the life of an engine
    folder: Path
    weights: Any = None  # `tidewheel.models.lora_folder.LoraWeights`
    error: TidewheelError | None = None


class LoraLoad(NamedTuple):
    """Order to copy an adapter's weights to a slot of the device before a step."""

    slot: int  # in [0, max_loras)
    lora: Lora  # its weights are loaded
