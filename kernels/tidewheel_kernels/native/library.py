from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
ELEMENTS = {torch.float32: "ELEMENT_FLOAT32", torch.bfloat16: "ELEMENT_BFLOAT16"}
# Not all of -ffast-math: NaN must stay NaN, and denormals must not become zero process-wide.
FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math",
    "-fno-signed-zeros", "-fopenmp", "-fvisibility=hidden", "-shared", "-fPIC",
)  # fmt: skip
COMPILERS = ("gcc", "cc")
# Linux allows AMX tiles on request (arch/x86/include/uapi/asm/prctl.h).
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
CPU_INFO = Path("/proc/cpuinfo")
MAPS = Path("/proc/self/maps")
FOLDER = Path("tidewheel", "kernels")
TIMEOUT_S = 120
POINTER, LONG, FLOAT, THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int32


class NativeUnavailable(RuntimeError):
    pass


class NativeKernel(dict[torch.dtype, Callable[..., None]]):
    """Table from dtype to C function, which is compiled and loaded at first use."""

    def __init__(self, name: str, *types: Any) -> None:
        super().__init__()
        self._name = name
        self._types = types

    def __missing__(self, dtype: torch.dtype) -> Callable[..., None]:
        library = native_library(dtype)
        assert library is not None, f"no native kernels for {dtype}"
        function = getattr(library, self._name)
        function.argtypes, function.restype = self._types, None
        self[dtype] = function
        return self[dtype]


def mixed_dtypes(dtype: torch.dtype, *tensors: torch.Tensor | None) -> TypeError:
    other = next(tensor.dtype for tensor in tensors if tensor is not None and tensor.dtype != dtype)
    return TypeError(f"a native kernel for {dtype} was given {other}: convert it")


@functools.cache
def native_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype not in ELEMENTS:
        return None
    try:
        return _compiled_and_loaded(dtype, find_compiler(os.environ))
    except (NativeUnavailable, OSError) as error:
        logger.warning("decode steps will be slower, in plain torch operations: %s", error)
        return None


def _compiled_and_loaded(dtype: torch.dtype, compiler: str) -> ctypes.CDLL:
    folder = _private(cache_folder(os.environ))
    if folder is None:
        with tempfile.TemporaryDirectory() as scratch:
            return _loaded(_compiled(dtype, compiler, Path(scratch)))
    path = _compiled(dtype, compiler, folder)
    try:
        return _loaded(path)
    except OSError as error:
        logger.warning("%s is compiled anew: %s", path, error)
        path.unlink(missing_ok=True)
        return _loaded(_compiled(dtype, compiler, folder))


def cache_folder(environment: Mapping[str, str]) -> Path:
    caches = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME") or "/") / ".cache")
    return Path(caches) / FOLDER


def find_compiler(environment: Mapping[str, str]) -> str:
    named = environment.get("CC")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        raise NativeUnavailable(f"there is no C compiler {named or 'gcc'}: install gcc, or set CC")
    return found


def _compiled(dtype: torch.dtype, compiler: str, folder: Path) -> Path:
    sources = sorted(SOURCES.glob("*.c"))
    options = [*FLAGS, f"-D{ELEMENTS[dtype]}", *processor_flags()]
    digest = hashlib.sha256(repr((options, compiler, _version(compiler), processor())).encode())
    for file in [*sources, *sorted(SOURCES.glob("*.h"))]:
        digest.update(file.read_bytes())
    path = folder / f"native-{digest.hexdigest()[:24]}.so"
    if path.is_file():
        return path
    # Processes may compile at once; the last replaces the others.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / path.name
        objects = [str(made.with_name(f"{source.stem}.o")) for source in sources]
        compiles = [
            [compiler, *options, "-c", str(source), "-o", made_of]
            for source, made_of in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor() as pool:  # seconds each
            list(pool.map(_run, compiles))
        _run([compiler, *options, *objects, "-o", str(made), "-lm"])
        return made.replace(path)


def _private(folder: Path) -> Path | None:
    """Return the folder if only this user can write to it: its files are executed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    is_mine = found.st_uid == os.getuid() and not others_write and os.access(folder, os.W_OK)
    return folder if is_mine else None


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or [f"status {error.returncode}"]
        raise NativeUnavailable(f"{command[0]} failed: {last[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} cannot be run: {error}") from error
    return done.stdout


def processor() -> str:
    """Return machine type and CPU flags, in lower case: machines may share libraries."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").lower().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "features"))), "")
    return f"{platform.machine()} {flags}"


def processor_flags() -> list[str]:
    features = processor().split()
    wide = ["-mprefer-vector-width=512"] if "avx512f" in features else []  # gcc chooses 256
    return [*wide, "-DTILES"] if "amx_bf16" in features and _may_use_tiles() else wide


def _may_use_tiles() -> bool:
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    runtimes = thread_runtimes()
    if len(runtimes) > 1:
        # Two thread pools would compete for cores.
        raise NativeUnavailable(f"torch does not share its OpenMP runtime ({', '.join(sorted(runtimes))})")
    return library


def thread_runtimes() -> set[str]:
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return set()
    mapped = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    return {path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))}


def libgomp() -> str | None:
    """Return the path of GNU OpenMP, if torch has no other."""
    runtimes = list(thread_runtimes())
    return runtimes[0] if [Path(name).name[:7] for name in runtimes] == ["libgomp"] else None
