"""The examples of docs/clients.md, as they stand but for the addresses, against the real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.triton.serving import Server

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
SECTIONS = ("## Ten examples", "## Tests of programs that use a client")
LIMIT_S = 120


def examples() -> dict[str, tuple[str, str]]:
    """Return language and text by name."""
    found: dict[str, tuple[str, str]] = {}
    for section in SECTIONS:
        text = PAGE.partition(f"{section}\n")[2].partition("\n## ")[0]
        heading = section.strip("# ")
        parts = re.findall(r"^### ([^\n]+)$|^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for title, language, block in parts:
            heading = title or heading
            if block:
                found[f"{heading}, {language} {len(found)}"] = (language, block)
    return found


EXAMPLES = examples()


def test_there_are_ten_and_those_without_a_server() -> None:
    assert len({name.rpartition(", ")[0] for name in EXAMPLES}) == 11


@pytest.mark.parametrize(("language", "block"), EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_runs(server: Server, language: str, block: str) -> None:
    addresses = {
        "127.0.0.1:8001": server.grpc,
        "localhost:8000": server.http.removeprefix("http://"),
        "localhost:8002": f"127.0.0.1:{server.metrics_port}",
        "localhost:8003": f"127.0.0.1:{server.health_port}",
    }
    for documented, actual in addresses.items():
        block = block.replace(documented, actual)
    if "locust" in block:
        block = f"{block.rstrip()} --grpc-url {server.grpc} --host {server.http}"
    command = [sys.executable, "-c", block] if language == "python" else ["bash", "-eo", "pipefail", "-c", block]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or done.stderr or "assert" in block
