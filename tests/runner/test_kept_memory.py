"""Memory that a step frees stays for the next one; Linux would clear its pages again."""

from __future__ import annotations

import subprocess
import sys

import pytest

RESIDENT_AFTER_A_STEP = """
import ctypes
from pathlib import Path
from tidewheel.runner.host_memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
if {keeps}:
    keep_freed_memory()
results = [libc.malloc(20 << 20) for _ in range(6)]
for result in results:
    ctypes.memset(result, 1, 20 << 20)
for result in results:
    libc.free(result)
print(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20)
"""


def resident_mib(*, keeps: bool) -> int:
    program = RESIDENT_AFTER_A_STEP.format(keeps=keeps)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_results_that_are_freed_stay() -> None:
    assert resident_mib(keeps=False) < 100 < resident_mib(keeps=True)
