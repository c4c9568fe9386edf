"""Other makers' clients at the gateway, unchanged, in environments of their own that `make test-clients` makes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.gateway import scripted_agent
from support.gateway.running_gateway import RunningGateway, gateway_to
from support.triton.grpc_triton import FakeTriton, running

pytestmark = pytest.mark.e2e

ENVIRONMENTS = Path(__file__).parents[2] / "build" / "clients"
PROGRAMS = Path(__file__).with_name("programs")
TIMEOUT_S = 120
CODEX_CONFIG = """\
model = "demo"
model_provider = "tidewheel"
web_search = "disabled"
[agents]
enabled = false
[model_providers.tidewheel]
name = "tidewheel"
base_url = "{url}/v1"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with running(FakeTriton(models=("demo",))) as fake, gateway_to(fake.port) as one:
        fake.answer = scripted_agent.answer
        yield one


def run(command: list[str | Path], folder: Path, **variables: str) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def executable(environment: str, path: str) -> Path:
    found = ENVIRONMENTS / environment / path
    if not found.exists():
        pytest.skip(f"{found} is missing: make test-clients CLIENTS={environment}")
    return found


@pytest.mark.parametrize("name", ["openai", "anthropic", "langchain", "pydantic-ai"])
def test_a_library(gateway: RunningGateway, tmp_path: Path, name: str) -> None:
    python = executable(name, "bin/python")
    run([python, "-W", "ignore", PROGRAMS / f"with_{name.replace('-', '_')}.py", gateway.url], tmp_path)


def test_claude(gateway: RunningGateway, tmp_path: Path) -> None:
    """It runs the command that the model asks for, and says its output."""
    claude = executable("claude-code", "node_modules/@anthropic-ai/claude-code-linux-x64/claude")
    said = run(
        [claude, "-p", "Say a word", "--allowedTools", "Bash"],
        tmp_path,
        ANTHROPIC_BASE_URL=gateway.url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="demo",
        ANTHROPIC_SMALL_FAST_MODEL="demo",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert "The tool says tide-42" in said


def test_codex(gateway: RunningGateway, tmp_path: Path) -> None:
    codex = executable("codex", "node_modules/.bin/codex")
    config = tmp_path / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text(CODEX_CONFIG.format(url=gateway.url))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    said = run([codex, "exec", *options, "Say a word"], tmp_path)
    assert "tide-42" in said
