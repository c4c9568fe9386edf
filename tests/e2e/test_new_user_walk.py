"""A new user's walk: clone, demo, a model of one's own, OpenAI's client, priority for one tenant, `top`.

Each step is a block of README.md or docs/recipes.md. Changed are ports, the name of the model and its folder, and the
environment into which `make demo` would install.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from support.documentation.page_commands import Shell, blocks
from support.models import tiny_models
from support.triton.serving import ROOT, WEIGHTS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
README, RECIPES, OWN = "README.md", "docs/recipes.md", "Qwen3-0.6B"


@pytest.fixture
def shell(short_path: Path) -> Iterator[Shell]:
    clone = short_path / "tidewheel"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(clone)], check=True)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    return Shell(short_path / "run", clone)


@pytest.fixture
def own_model(short_path: Path) -> Path:
    """A folder like that of Qwen3-0.6B, with random weights of a much smaller size."""
    folder = short_path / OWN
    tiny_models.save(partial(tiny_models.qwen3, vocab_size=4096, max_position_embeddings=40_960), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(WEIGHTS / name, folder)
    return folder


def line_of(block: str, words: str) -> str:
    """Return the command of a block that has the words."""
    (line,) = (line for line in block.splitlines() if words in line)
    return line.partition("  #")[0]


def test_a_new_users_walk(shell: Shell, own_model: Path) -> None:
    (two_commands,) = blocks(README, "Two commands")["sh"]
    make_demo = line_of(two_commands, "make demo")
    printed = shell.run(make_demo.replace("make demo", "make --old-file=.venv/.installed demo CHAT=0"))
    assert "A tuple is" in printed

    (of_own,) = blocks(README, "Serve your own model")["sh"]
    assert "tritonserver" in shell.run(line_of(of_own, "tidewheel doctor"))
    call = blocks(README, "Call it")
    serve = line_of(of_own, "tidewheel serve").replace(f"/models/{OWN}", str(own_model))
    with shell.running(serve, "8003/ready"):
        assert "text_output" in shell.run(call["sh"][0].replace("models/demo", f"models/{OWN}"))
        assert shell.run(call["python"][0].replace('"demo"', f'"{OWN}"'), "python")

    paying = blocks(RECIPES, "Paying customers first")
    serve = paying["sh"][0].replace("model_repository/demo/1/weights --model-name demo", str(own_model))
    (top,) = blocks(RECIPES, "Why was I refused")["sh"]
    with shell.running(serve, "8080/health"):
        answer = shell.run(paying["python"][0].replace('"demo"', f'"{OWN}"'), "python")
        assert answer.strip()
        shell.run(line_of(paying["sh"][1], "tidewheel generate").replace("--model demo", f"--model {OWN}"))
        seen = shell.run(line_of(top, "tidewheel top"))
        assert OWN in seen or "IDLE" in seen, seen
