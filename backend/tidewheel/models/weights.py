from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from tidewheel.errors import ConfigError
from tidewheel.model_formats import MAX_CONFIG_BYTES
from tidewheel.models.causal_lm import Progress
from tidewheel.models.safetensors_file import FileChunk, SafetensorsFile, plan_chunks
from tidewheel.models.weight_stream import SLOT_BYTES, sink_on, stream_chunks
from tidewheel.regular_files import read_object
from tidewheel.runner.host_memory import available_host_bytes
from tidewheel.settings import shown_bytes

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
STAGE = "weights"
RANDOM_STD = 0.02
NUM_NAMED = 3


def check_weights_fit(num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ConfigError`, naming what would fit, if weights of `num_bytes` exceed free memory."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = f"{torch.cuda.get_device_name(device)} has {shown_bytes(free)} free of {shown_bytes(total)}"
    else:
        free = total = available_host_bytes()
        room = f"{shown_bytes(free)} of host memory are free"
    if num_bytes > free:
        needed = f"the weights need {shown_bytes(num_bytes)} as {str(dtype).removeprefix('torch.')}"
        raise ConfigError(f"{needed}, and {room}: {_what_would_fit(num_bytes, dtype, free, total, device)}")


def _what_would_fit(num_bytes: int, dtype: torch.dtype, free: int, total: int, device: torch.device) -> str:
    halved = num_bytes * torch.bfloat16.itemsize // dtype.itemsize
    if dtype.itemsize > torch.bfloat16.itemsize and halved <= free:
        return f"set dtype to 'bfloat16', which needs {shown_bytes(halved)}"
    if device.type == "cpu":
        return "use a machine or a container with more memory, or a smaller model"
    if num_bytes <= total:
        return f"{shown_bytes(total - free)} are in use; stop what else runs on this GPU, or use another"
    return f"use a GPU with more than {shown_bytes(num_bytes)}"


def checkpoint_files(folder: Path) -> list[SafetensorsFile]:
    if os.path.lexists(folder / INDEX_NAME):  # its reader reports an unreadable one
        paths = _indexed_paths(folder)
    elif os.path.lexists(folder / SINGLE_NAME):
        paths = [folder / SINGLE_NAME]
    elif any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise ConfigError(f"{folder} has pickled weights only, which are never loaded: convert them to safetensors")
    else:
        raise ConfigError(f"{folder} has no weights: {SINGLE_NAME} and {INDEX_NAME} are both missing")
    return [SafetensorsFile(path) for path in paths]


def _indexed_paths(folder: Path) -> list[Path]:
    where = folder / INDEX_NAME
    weight_map = read_object(where, MAX_CONFIG_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{where} has no weight_map: download it again")
    paths = []
    for name in sorted({str(value) for value in weight_map.values()}):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ConfigError(f"{where} names {name!r}: only safetensors files beside it are read")
        if not os.path.lexists(folder / name):
            raise ConfigError(f"{folder / name} is missing, though {INDEX_NAME} names it: download it again")
        paths.append(folder / name)
    return paths


def load_weights(
    files: Iterable[SafetensorsFile],
    destinations: Mapping[str, torch.Tensor],
    progress: Progress,
    *,
    ignored: Callable[[str], bool],
) -> None:
    """Copy each tensor to its contiguous destination, converting the dtype.

    Raise `ConfigError` for a missing tensor, and for a tensor without destination unless `ignored`.
    """
    files = list(files)
    check_names(files, destinations, ignored)
    chunks = plan_chunks(files, destinations, SLOT_BYTES)
    device = next(iter(destinations.values())).device
    total, done = sum(chunk.size for chunk in chunks), 0

    def delivered(chunk: FileChunk) -> None:
        nonlocal done
        done += chunk.size
        progress(STAGE, done / total)

    stream_chunks(chunks, sink_on(device), delivered)


def check_names(
    files: list[SafetensorsFile], destinations: Mapping[str, torch.Tensor], ignored: Callable[[str], bool]
) -> None:
    where = files[0].path.parent
    seen: set[str] = set()
    for file in files:
        for name, entry in file.entries.items():
            if name in seen:
                raise ConfigError(f"{where}: {name} is in more than one file")
            seen.add(name)
            destination = destinations.get(name)
            if destination is None:
                continue
            if entry.shape != tuple(destination.shape):
                raise ConfigError(
                    f"{file.path}: {name} has shape {list(entry.shape)}, "
                    f"config.json asks for {list(destination.shape)}"
                )
            if not entry.dtype.is_floating_point:
                raise ConfigError(f"{file.path}: {name} has dtype {entry.dtype}; only float weights are served")
    missing = [name for name in destinations if name not in seen]
    if missing:
        raise ConfigError(f"{where}: the checkpoint lacks {named(missing)}; its files and config.json do not match")
    left_over = [name for name in seen if name not in destinations and not ignored(name)]
    if left_over:
        raise ConfigError(f"{where}: the checkpoint has {named(left_over)}, which config.json has no place for")


def named(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = len(ordered) - NUM_NAMED
    return ", ".join(ordered[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def fill_random(destinations: Mapping[str, torch.Tensor], seed: int, progress: Progress) -> None:
    """Fill weights with random values, equal for equal names, shapes, seed and device model."""
    generator = torch.Generator(next(iter(destinations.values())).device)
    for count, (name, tensor) in enumerate(destinations.items(), 1):
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, RANDOM_STD, generator=generator.manual_seed(seed ^ zlib.crc32(name.encode())))
        progress(STAGE, count / len(destinations))
