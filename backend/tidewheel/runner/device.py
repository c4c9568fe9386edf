"""Which device and which number format: resolved once, from settings and from what the machine has."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from tidewheel.config import DType, EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.base import DTYPES

logger = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 64 << 20

CPU_INFO = Path("/proc/cpuinfo")
# Instructions that multiply bfloat16 matrices: x86 AVX-512 BF16 and AMX, and Arm's BF16 extension.
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_device(config: EngineConfig) -> torch.device:
    """Raises `ConfigError` when CUDA is asked for and absent."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda', but torch sees no CUDA device: set device to 'cpu' or 'auto'")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def limit_threads(weights_bytes: int) -> None:
    """One CPU thread for a model whose operations are too small to share out.

    Its threads would spend their time waiting for each other, and where the front end and tritonserver want the
    same cores, a waiting thread that is not running stops the step: 27 times slower was seen on 2 busy cores.
    """
    if weights_bytes < SMALL_MODEL_BYTES:
        torch.set_num_threads(1)


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return torch.cuda.get_device_name(device)


def resolve_dtype(wanted: DType, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """The dtype that the model runs in; `checkpoint` is that of its files, where known."""
    name = wanted if wanted != "auto" else _automatic_dtype(checkpoint, device)
    logger.info(
        "dtype %s (setting %s, checkpoint %s, %s)", name, wanted, checkpoint or "unknown", device_name(device)
    )
    return DTYPES[name]


def _automatic_dtype(checkpoint: str | None, device: torch.device) -> str:
    if device.type == "cpu":
        return "bfloat16" if checkpoint == "bfloat16" and cpu_has_bf16() else "float32"
    if checkpoint == "float16" or not torch.cuda.is_bf16_supported():
        return "float16"
    return "bfloat16"


def cpu_has_bf16(cpu_info: Path = CPU_INFO) -> bool:
    """Whether this processor multiplies bfloat16 natively; without it float32 is faster."""
    try:
        lines = cpu_info.read_text(errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not BF16_FLAGS.isdisjoint(flags.split())
