"""A Redis whose wall clock a test sets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.triton.serving import wait_for
from tidewheel_queue.redis_endpoint import find_server

SHIFT = Path(__file__).with_name("shifted_clock.c")


class ShiftedRedis:
    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder}/redis.sock"
        self._shift_file = folder / "shift"
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """Set the clock so far from the right time."""
        part = self._shift_file.with_suffix(".part")
        part.write_text(str(seconds))
        part.replace(self._shift_file)


@contextmanager
def running(folder: Path) -> Iterator[ShiftedRedis]:
    """Serve on a socket in the folder. Skip the test where there is no compiler of C."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("install a compiler of C to set the clock of Redis")
    shim = folder / "shifted_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", shim, SHIFT, "-ldl"], check=True)
    server = ShiftedRedis(folder)
    variables = {**os.environ, "LD_PRELOAD": str(shim), "SHIFT_FILE": str(folder / "shift")}
    command = [find_server(), "--port", "0", "--unixsocket", "redis.sock", "--appendonly", "yes"]
    process = subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL)
    try:
        wait_for((folder / "redis.sock").exists, 60, "Redis with a clock of its own")
        yield server
    finally:
        process.kill()
        process.wait()
