"""Stand-in for the CUDA driver: triton-lang compiles for an H200 and launches, and each launch ends at the driver.

triton-lang's own C code packs the arguments and calls `cuLaunchKernelEx`, so host time is real but for the driver's.
Kernels are compiled, and kept in triton-lang's cache.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

# Attributes by number: 75 and 76 are the parts of the capability, 0 of a function its threads.
SOURCE = """
typedef unsigned long long u64;
long num_launches;
static u64 next = 4096;
int cuCtxGetCurrent(u64 *context) { *context = 1; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(u64 *context, int device) { *context = 1; return 0; }
int cuDeviceGetAttribute(int *value, int name, int device) {
  *value = name == 75 ? 9 : name == 76 ? 0 : 232448;
  return 0;
}
int cuFuncGetAttribute(int *value, int name, u64 function) { *value = name ? 0 : 1024; return 0; }
int cuModuleLoadData(u64 *module, const void *image) { *module = next += 16; return 0; }
int cuModuleGetFunction(u64 *function, u64 module, const char *name) { *function = next += 16; return 0; }
int cuPointerGetAttribute(u64 *value, int name, u64 pointer) { *value = pointer; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "none"; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuStreamIsCapturing(u64 stream, int *status) { *status = 0; return 0; }
int cuTensorMapEncodeTiled(u64 *map) { *map = 1; return 0; }
int cuLaunchKernelEx(const void *config, u64 function, void **params, void **extra) { ++num_launches; return 0; }
"""
DO_NOTHING = (
    "cuInit cuCtxSetCurrent cuCtxGetLimit cuCtxSetLimit cuFuncSetAttribute cuFuncSetCacheConfig cuModuleUnload "
    "cuOccupancyMaxActiveClusters cuTensorMapEncodeIm2col"
)


class Launches:
    """Count of launches that reached the driver."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._counter = ctypes.c_long.in_dll(library, "num_launches")

    @property
    def count(self) -> int:
        return self._counter.value


def _library(folder: Path) -> ctypes.CDLL:
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(SOURCE + "".join(f"int {name}() {{ return 0; }}\n" for name in DO_NOTHING.split()))
    command = ["gcc", "-shared", "-fPIC", "-O2", "-w", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@contextmanager
def stub_driver() -> Iterator[Launches]:
    """Let triton-lang take CPU tensors for those of an H200, for the rest of the process."""
    from triton import knobs
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
    from triton.runtime import driver

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(knobs.nvidia, "libcuda_path", folder):
        launches = Launches(_library(Path(folder)))
        active: Any = CudaDriver.__new__(CudaDriver)
        active.utils, active.launcher_cls = CudaUtils(), CudaLauncher
        active.get_device_capability = lambda _device: (9, 0)
        active.get_current_stream = lambda _device: 0
        active.get_current_device = lambda: 0
        driver.set_active(active)
        yield launches
