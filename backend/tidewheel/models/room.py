"""Check that weights fit onto a GPU, before anything is allocated or read."""

from __future__ import annotations

import torch

from tidewheel.errors import ConfigError

GIB = 1 << 30


def check_weights_fit(num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ConfigError` with what would fit. Only GPUs are checked: host memory can grow."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if num_bytes <= free:
        return
    needed = f"the weights need {_gib(num_bytes)} as {str(dtype).removeprefix('torch.')}"
    room = f"{torch.cuda.get_device_name(device)} has {_gib(free)} free of {_gib(total)}"
    raise ConfigError(f"{needed}, and {room}: {_what_would_fit(num_bytes, dtype, free, total)}")


def _what_would_fit(num_bytes: int, dtype: torch.dtype, free: int, total: int) -> str:
    halved = num_bytes * torch.bfloat16.itemsize // dtype.itemsize
    if dtype.itemsize > torch.bfloat16.itemsize and halved <= free:
        return f"set dtype to 'bfloat16', which needs {_gib(halved)}"
    if num_bytes <= total:
        return f"{_gib(total - free)} are in use; stop what else runs on this GPU, or use another"
    return f"use a GPU with more than {_gib(num_bytes)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
