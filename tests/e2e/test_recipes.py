"""The commands of docs/recipes.md, as they stand but for the ports."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from support.documentation.page_commands import Shell, blocks, has_no_member
from support.triton.serving import ROOT, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
PAGE = "docs/recipes.md"


@pytest.fixture
def shell(short_path: Path) -> Shell:
    return Shell(short_path / "run")


@pytest.fixture
def paying(shell: Shell) -> Iterator[dict[str, list[str]]]:
    """Run the server of the first recipe; return the recipe."""
    recipe = blocks(PAGE, "Paying customers first")
    with shell.running(recipe["sh"][0], "8080/health"):
        yield recipe


def test_paying_customers_first_and_why_others_were_refused(shell: Shell, paying: dict[str, list[str]]) -> None:
    printed = shell.run(paying["sh"][1])
    rows = {line.split()[3]: line.split() for line in printed.splitlines() if " tenant " in line}
    assert int(rows["acme"][7]) == 0 < int(rows["free"][7]), printed
    assert shell.run(paying["python"][0], "python").strip()
    (top,) = blocks(PAGE, "Why was I refused")["sh"]
    seen = shell.run(top)
    assert "READY" in seen or "IDLE" in seen, seen
    assert "tidewheel_requests_rejected_total" in seen and "tidewheel_tenant_requests_rejected_total" in seen


def test_how_much_kv_memory(shell: Shell) -> None:
    (check,) = blocks(PAGE, "How much KV memory")["sh"]
    assert "= 3,072 bytes a token" in shell.run(check)


def test_an_upgrade_drops_no_request(shell: Shell) -> None:
    gateway, script = blocks(PAGE, "Upgrade without dropping a request")["sh"]
    is_over, answers = threading.Event(), []

    def ask() -> None:
        while not is_over.is_set():
            body = {"model": "demo", "prompt": "A tuple is", "max_tokens": 20}
            answers.append(requests.post(shell.here("http://127.0.0.1:8080/v1/completions"), json=body, timeout=300))

    with shell.running(gateway, "8080/"):
        upgrade = subprocess.Popen(
            ["bash", "-ec", shell.here(script) + "\necho upgraded; wait $NEW"], env=shell.environment(), cwd=ROOT,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert upgrade.stdout is not None
        clients = [threading.Thread(target=ask) for _ in range(3)]
        try:
            wait_for(lambda: is_ready(shell), 300, "the old server")
            for client in clients:
                client.start()
            assert any("upgraded" in line for line in upgrade.stdout)
            after = len(answers)
            wait_for(lambda: len(answers) > after + 6, 120, "answers of the new server")
        finally:
            is_over.set()
            for client in filter(threading.Thread.is_alive, clients):
                client.join()
            subprocess.run(["kill", "-TERM", "--", f"-{upgrade.pid}"], check=False)
            upgrade.wait(120)
            wait_for(
                lambda: has_no_member(upgrade.pid), 120, "the end of the new server, which the shell does not await"
            )
    assert {answer.status_code for answer in answers} == {200}


def is_ready(shell: Shell) -> bool:
    return requests.get(shell.here("http://127.0.0.1:8080/health"), timeout=60).ok


def test_size_for_500_requests_a_second(shell: Shell) -> None:
    (simulate,) = blocks(PAGE, "Size for 500 requests a second")["sh"]
    assert "keep up with 500 requests/s" in shell.run(simulate)


def test_a_policy_of_my_own(shell: Shell, short_path: Path) -> None:
    recipe = blocks(PAGE, "A policy of my own")
    shutil.copytree(ROOT / "backend", short_path / "backend", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["patch", "-p1"], input="".join(recipe["diff"]), text=True, cwd=short_path, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(short_path / "backend"))
        (simulate,) = recipe["sh"]
        printed = shell.run(simulate.replace("tidewheel", f"{sys.executable} -m tidewheel.cli.main", 1))
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if "120%" in line and "tok" not in line}
    assert {"priority", "short-prompts"} <= rows.keys(), printed
    assert rows["short-prompts"] != rows["priority"]
