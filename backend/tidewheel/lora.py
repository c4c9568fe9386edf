"""LoRA adapters (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022) as values."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tidewheel.errors import ConfigError, TidewheelError
from tidewheel.parameters import control_character
from tidewheel.regular_files import parse_object, read_text

NO_SLOT = -1  # of rows that the base model computes
MULTI_LORA = "multi_lora.json"  # in the version folder: folders of adapters by name
MAX_LORA_NAMES = 4096
MAX_LORA_NAME_CHARS = 128
MAX_LORAS_BYTES = 96 << 10  # of all names and folders: an engine's command has them, and Linux limits it
_MAX_FILE_BYTES = 16 << 20


@dataclass(eq=False, slots=True, weakref_slot=True)
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
    rank: int | None = None  # None: not read yet
    stamp: object = None  # of its files, when they were read


class LoraLoad(NamedTuple):
    """Order to copy an adapter's weights to a slot of the device before a step."""

    slot: int  # in [0, max_loras)
    lora: Lora  # its weights are loaded


def parse_loras(text: str, where: str = "lora_modules") -> dict[str, str]:
    """Parse ``{"name": "folder"}``; empty text names no adapters. Raise `ConfigError`, which begins with `where`."""
    loras = parse_object(text, where) if text.strip() else {}
    if len(loras) > MAX_LORA_NAMES:
        raise ConfigError(f"{where} names {len(loras)} adapters: at most {MAX_LORA_NAMES} are allowed")
    if (size := len(json.dumps(loras))) > MAX_LORAS_BYTES:
        raise ConfigError(
            f"{where} has {size} bytes of names and folders: at most {MAX_LORAS_BYTES} are allowed; use shorter "
            "paths, or load adapters while the server runs"
        )
    for name, folder in loras.items():
        if not 0 < len(name) <= MAX_LORA_NAME_CHARS:
            raise ConfigError(f"{where} has a name of {len(name)} characters: it must be 1 to {MAX_LORA_NAME_CHARS}")
        if control := control_character(name):
            raise ConfigError(f"{where} has a name with {control}: remove it")
        if not isinstance(folder, str) or not folder or control_character(folder):
            raise ConfigError(f"{where}: {name} is {folder!r}: it must be the path of the adapter's folder")
    return {name: str(folder) for name, folder in loras.items()}


def read_multi_lora(version_folder: Path) -> dict[str, str]:
    """Return the absolute folders of `multi_lora.json` by name. Raise `ConfigError`.

    Relative paths start at the version folder, or at the working directory if they lead nowhere from there.
    """
    path = version_folder / MULTI_LORA
    folders = parse_loras(read_text(path, _MAX_FILE_BYTES) or "", str(path))
    starts = {name: version_folder if (version_folder / one).exists() else Path() for name, one in folders.items()}
    return {name: str((starts[name] / one).absolute()) for name, one in folders.items()}
