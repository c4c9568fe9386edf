import importlib.util
import logging
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tidewheel.config import CacheDType, DType, EngineConfig, Quantization
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import DTYPES, Progress
from tidewheel.models.model_folder import one_line
from tidewheel.private_dir import run_dir
from tidewheel_kernels import FP8, INT8, copy_blocks, runs_triton
from tidewheel_kernels.choice import ENVIRONMENT_VARIABLE as KERNELS_VARIABLE
from tidewheel_kernels.choice import preferences
from tidewheel_kernels.native.library import cache_folder as native_cache_folder
from tidewheel_kernels.native.library import processor

logger = logging.getLogger(__name__)

SMALL_MODEL_BYTES = 64 << 20
LEAST_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)

TAKEN = ("out of memory", "busy or unavailable")  # CUDA errors of a full device

# CPU flags: x86 AVX-512 BF16 and AMX, Arm BF16.
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_device(config: EngineConfig) -> torch.device:
    """Raise `ConfigError` if CUDA is requested but unusable, or the GPU too old."""
    obstacle = cuda_obstacle() if config.device != "cpu" else "device is 'cpu'"
    if config.device == "cuda" and obstacle:
        raise ConfigError(f"device is 'cuda', but {obstacle}; or set device to 'cpu' or 'auto'")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if obstacle:
        logger.info("runs on the CPU: %s", obstacle)
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {dotted(capability)}: bfloat16 and the "
            f"kernels need at least {dotted(LEAST_CAPABILITY)} (Ampere); use a newer GPU, or set device to 'cpu'"
        )
    return device


def cuda_obstacle() -> str:
    """Return why torch cannot use a GPU, and what to do; empty if it can."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: install one with it"
    build = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # names an outdated driver
        first_sentences = " ".join(str(error).split()).split(" Please ")[0].rstrip(". ")
        return f"{build} cannot use a GPU: {first_sentences}"
    return f"{build} sees no GPU: look at CUDA_VISIBLE_DEVICES and nvidia-smi"


def check_ranks_fit(config: EngineConfig) -> None:
    """Raise `ConfigError` if there are more ranks than GPUs, or than cores without GPUs."""
    count, kind = (torch.cuda.device_count(), "GPU") if uses_gpus(config) else (num_cores(), "core")
    if config.tensor_parallel_size > count:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}: each rank needs a {kind} of its own, and there "
            f"{'is' if count == 1 else 'are'} {count}; set it to at most {count}"
        )


def uses_gpus(config: EngineConfig) -> bool:
    return config.device != "cpu" and not cuda_obstacle()


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def limit_threads(weights_bytes: int) -> None:
    """Use one CPU thread for a small model: two took 27 times as long on two busy cores."""
    if weights_bytes < SMALL_MODEL_BYTES:
        torch.set_num_threads(1)


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        num_threads = torch.get_num_threads()
        return f"cpu ({num_threads} thread{'' if num_threads == 1 else 's'})"
    return torch.cuda.get_device_name(device)


def resolve_dtype(wanted: DType, checkpoint: str | None, device: torch.device) -> torch.dtype:
    name = wanted if wanted != "auto" else _automatic_dtype(checkpoint, device)
    logger.info(
        "dtype %s (setting %s, checkpoint %s, %s)", name, wanted, checkpoint or "unknown", device_name(device)
    )
    return DTYPES[name]


def resolve_cache_dtype(wanted: CacheDType, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of keys and values. Raise `ConfigError` if the device has no kernels for it."""
    if wanted == "auto":
        return dtype
    if wanted == "int8":
        if device.type == "cuda" or runs_triton(device.type):
            raise ConfigError(
                f"kv_cache_dtype is int8, and {device_name(device)} runs kernels that read no such cache: set it to "
                "fp8_e4m3 or auto"
            )
        return INT8
    _check_converts(f"kv_cache_dtype is {wanted}", "auto", device)
    return FP8


def check_deterministic(wanted: bool, device: torch.device) -> None:
    """Raise `ConfigError` if the device's kernels give a row different sums in different batches."""
    if wanted and not runs_triton(device.type):
        raise ConfigError(
            "deterministic is true, which only triton-lang's kernels promise, and here others run: use a GPU, and "
            f"leave {KERNELS_VARIABLE} out, or set it to false"
        )


def check_quantization(wanted: Quantization, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ConfigError` if the GPU cannot multiply 8-bit floats, or `dtype` is not bfloat16."""
    if wanted != "fp8" or device.type == "cpu":
        return
    _check_converts(f"quantization is {wanted}", "none", device)
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"quantization is {wanted}, and dtype is {name}: set dtype to bfloat16, the result of products of 8 bits"
        )


def _check_converts(setting: str, other: str, device: torch.device) -> None:
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        raise ConfigError(
            f"{setting}: {torch.cuda.get_device_name(device)} has compute capability {dotted(capability)}, and "
            f"8-bit floats need at least {dotted(FP8_CAPABILITY)}; set it to {other}"
        )


def _automatic_dtype(checkpoint: str | None, device: torch.device) -> str:
    if device.type == "cpu":
        return "bfloat16" if checkpoint == "bfloat16" and cpu_has_bf16() else "float32"
    return "float16" if checkpoint == "float16" else "bfloat16"


def cpu_has_bf16() -> bool:
    return not BF16_FLAGS.isdisjoint(processor().split())


class CompileLog:
    """Listener that reports kernel compilations of triton-lang while serving."""

    def __init__(self) -> None:
        self._counts = {"compiled": 0, "loaded": 0}
        self._report: Progress | None = None  # None: not serving

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        what = "loaded" if cache_hit else "compiled"
        self._counts[what] += 1
        if self._report is not None:
            seconds = 1e-6 * times.total
            logger.warning("kernel %s was %s while requests waited: %.2f s", src.name, what, seconds)
            self._report("", 1.0)

    def begin_serving(self, report: Progress) -> None:
        """Report each kernel from now on: ("compile", 0.0), and at its end ("", 1.0)."""
        import triton

        def begin(**_: object) -> None:  # a true result would keep triton-lang from compiling
            report("compile", 0.0)

        triton.knobs.runtime.jit_cache_hook = begin
        self._report = report
        logger.info("kernels: %d compiled, %d loaded from the cache", *self._counts.values())


def prepare_kernels(device: torch.device) -> CompileLog | None:
    """Try a small kernel and return a listener; None without kernels. Raise `ConfigError`."""
    if device.type != "cuda" or set(preferences().values()) == {"reference"}:
        return None
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("a GPU needs triton-lang, which is not installed: install 'triton', or set device to 'cpu'")
    os.environ["TRITON_CACHE_DIR"] = str(cache_folder(os.environ))
    log = CompileLog()
    try:
        import triton

        triton.knobs.compilation.listener = log
        _run_a_kernel(device)
    except Exception as error:
        raise _explained(error, device) from error
    return log


def _run_a_kernel(device: torch.device) -> None:
    first, second = (torch.full((1,), index, dtype=torch.int64, device=device) for index in (0, 1))
    copy_blocks(torch.zeros(1, 2, 16, device=device), first, second)
    torch.cuda.synchronize(device)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return a writable folder for compiled kernels. Raise `ConfigError` if the configured one is read-only."""
    named = environment.get("TRITON_CACHE_DIR")
    if not named and environment.get("TRITON_HOME"):
        named = str(Path(environment["TRITON_HOME"]) / ".triton" / "cache")
    if named:
        if not _can_write(Path(named)):
            raise ConfigError(f"compiled kernels cannot be kept in {named}: set TRITON_CACHE_DIR to another folder")
        return Path(named)
    folder = native_cache_folder(environment)
    return folder if _can_write(folder) else run_dir() / folder.name


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except OSError:
        return False
    return True


def _explained(error: Exception, device: torch.device) -> ConfigError:
    if isinstance(error, subprocess.CalledProcessError):
        return ConfigError(
            f"triton-lang needs a C compiler and Python's headers, but {error.cmd[0]} failed (the log tells why): "
            "install python3-dev, or set CC"
        )
    if "Failed to find C compiler" in str(error) or isinstance(error, FileNotFoundError):
        return ConfigError("triton-lang needs a C compiler, and there is none: install gcc, or set CC")
    name = torch.cuda.get_device_name(device)
    if any(words in str(error) for words in TAKEN):
        return ConfigError(
            f"{name} is held by another program, which nvidia-smi names: stop it, or use another GPU "
            f"({one_line(error, 80)})"
        )
    return ConfigError(f"kernels cannot be compiled for {name}, or run on it: {one_line(error)}")
