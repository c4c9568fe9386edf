"""`tidewheel serve --end-with-stdin` below a parent that is killed: it ends once, politely, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import requests

from support.triton.serving import REPOSITORY, has_ended, wait_for

pytestmark = pytest.mark.e2e
LIMIT_S = 90.0
FREE = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0")
PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def is_ready(ports: Path) -> bool:
    if not ports.exists():
        return False
    health = json.loads(ports.read_text())["health"]
    try:
        return requests.get(f"http://127.0.0.1:{health}/ready", timeout=60).ok
    except requests.ConnectionError:
        return False


def test_a_killed_parent_takes_the_server_along() -> None:
    with tempfile.TemporaryDirectory(prefix="tw-") as name:
        folder, ports = Path(name), Path(name) / "ports.json"
        serve = [sys.executable, "-m", "tidewheel.cli.main", "serve", "--model-repository", str(REPOSITORY)]
        serve += ["--models", "demo", *FREE, f"--ports-file={ports}", "--end-with-stdin", "--drain-s=0.5"]
        (folder / "run").mkdir()
        with (folder / "log").open("wb") as log:
            parent = subprocess.Popen(
                [sys.executable, "-c", PARENT, *serve],
                stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "TIDEWHEEL_RUN_DIR": str(folder / "run")},
            )  # fmt: skip
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_for(lambda: is_ready(ports), LIMIT_S, f"ready server: {(folder / 'log').read_text()}")
        below = [child, *child.children(recursive=True)]
        assert len(below) > 3
        parent.kill()
        parent.wait()
        wait_for(lambda: all(map(has_ended, below)), LIMIT_S, "end of all")
        parent.stdout.close()
        assert (folder / "log").read_text().count("stopping: running requests have 0.5 s to end") == 1
        wait_for(lambda: not any((folder / "run").iterdir()), LIMIT_S, "removal of all files")
        assert not ports.exists()
