from __future__ import annotations

import torch

from tidewheel.errors import ConfigError
from tidewheel.runner.host_memory import available_host_bytes
from tidewheel.settings import shown_bytes

BYTES_OF_ROUNDED = {"int8": 17 / 16, "int4": 5 / 8}  # of a weight, with scales and minimums


def check_weights_fit(
    num_bytes: int, dtype: torch.dtype, device: torch.device, *, can_round: bool = False, name: str = "the weights"
) -> None:
    """Raise `ConfigError`, with what would fit, if weights exceed free memory; `can_round`: `quantization` helps."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = f"{torch.cuda.get_device_name(device)} has {shown_bytes(free)} free of {shown_bytes(total)}"
    else:
        free = total = available_host_bytes()
        room = f"{shown_bytes(free)} of host memory are free"
    if num_bytes > free:
        needed = f"{name} need {shown_bytes(num_bytes)} as {str(dtype).removeprefix('torch.')}"
        raise ConfigError(
            f"{needed}, and {room}: {_what_would_fit(num_bytes, dtype, free, total, device, can_round)}"
        )


def _what_would_fit(
    num_bytes: int, dtype: torch.dtype, free: int, total: int, device: torch.device, can_round: bool
) -> str:
    halved = num_bytes * torch.bfloat16.itemsize // dtype.itemsize
    if dtype.itemsize > torch.bfloat16.itemsize and halved <= free:
        return f"set dtype to 'bfloat16', which needs {shown_bytes(halved)}"
    for name, share in BYTES_OF_ROUNDED.items() if can_round else ():
        if (rounded := int(num_bytes / dtype.itemsize * share)) <= free:
            return f"set quantization to {name!r}, which needs about {shown_bytes(rounded)}"
    if device.type == "cpu":
        return "use a machine or a container with more memory, or a smaller model"
    if num_bytes <= total:
        return f"{shown_bytes(total - free)} are in use; stop what else runs on this GPU, or use another"
    return f"use a GPU with more than {shown_bytes(num_bytes)}"
