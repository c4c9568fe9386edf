"""Commands of a page of documentation, run as they stand but for ports, in a run directory of their own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import requests

from support.triton.serving import ROOT, free_ports, wait_for

START_LIMIT_S = 300.0
LIMIT_S = 300.0
PORTS = (8000, 8001, 8002, 8003, 8080, 9000, 9001, 9002, 9003)
_PORT = re.compile(rf"\b({'|'.join(map(str, PORTS))})\b")


def blocks(page: str, title: str) -> dict[str, list[str]]:
    """Return the blocks of code below a heading of the second level, by language."""
    section = (ROOT / page).read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found: dict[str, list[str]] = {}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        found.setdefault(language, []).append(block)
    return found


@dataclass
class Shell:
    run_dir: Path
    folder: Path = ROOT
    ports: dict[str, str] = field(
        default_factory=lambda: dict(zip(map(str, PORTS), map(str, free_ports(len(PORTS))), strict=True))
    )

    def here(self, block: str) -> str:
        """Return the commands with ports that are free; those that rely on a default get it as an option."""
        lines = []
        for line in block.replace("\\\n", " ").splitlines():
            if "tidewheel serve" in line and "--http-port" not in line:
                ports = "--http-port 8000 --grpc-port 8001 --metrics-port 8002 --health-port 8003"
                line = line.replace("tidewheel serve", f"tidewheel serve {ports}")
            line = re.sub(r"tidewheel (generate|chat)(?! --url)", r"tidewheel \1 --url 127.0.0.1:8001", line)
            lines.append(_PORT.sub(lambda found: self.ports[found[0]], line))
        return "\n".join(lines)

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        return {**os.environ, "PATH": path, "TIDEWHEEL_RUN_DIR": str(self.run_dir), "HF_HUB_OFFLINE": "1"}

    def run(self, block: str, language: str = "sh") -> str:
        """Return what the block prints."""
        command = [sys.executable, "-c"] if language == "python" else ["bash", "-eo", "pipefail", "-c"]
        done = subprocess.run(
            [*command, self.here(block)], cwd=self.folder, env=self.environment(), capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def running(self, block: str, ready: str) -> Iterator[None]:
        """Run a block, whose last command goes on, from when the port and path `ready` answer."""
        *before, last = self.here(block).splitlines()
        log = self.run_dir.parent / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-ec", "\n".join([*before, f"exec {last}"])], cwd=self.folder, env=self.environment(),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(requests.RequestException):
                return requests.get(f"http://127.0.0.1:{self.here(ready)}", timeout=60).ok
            return False

        try:
            wait_for(is_ready, START_LIMIT_S, f"{block} is ready: {log}")
            yield
        finally:
            process.terminate()
            process.wait(120)


def has_no_member(group: int) -> bool:
    """Return whether no process of the group is left: a shell does not await those in its background."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False
