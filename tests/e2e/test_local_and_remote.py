"""The commands of docs/edge.md for a local server that overflows to a remote one, as they stand but for the ports."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import requests

from support.documentation.page_commands import Shell, blocks, has_no_member
from support.triton.serving import ROOT, wait_for
from tidewheel.metrics import UPSTREAM_READY, UPSTREAM_SENT
from tidewheel_client import Figures

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def samples(shell: Shell, name: str) -> dict[str, float]:
    page = requests.get(shell.here("http://127.0.0.1:8080/metrics"), timeout=60).text
    return {sample.labels["upstream"]: sample.value for sample in Figures.parse(page).samples(name)}


def test_a_local_server_overflows_to_a_remote_one(short_path: Path) -> None:
    shell = Shell(short_path / "run")
    servers, gateway, _, load = blocks("docs/edge.md", "A local server that overflows to a remote one")["sh"]
    local, remote = re.findall(r"--url (127\.0\.0\.1:\d+)", shell.here(gateway))
    running = subprocess.Popen(
        ["bash", "-ec", shell.here(servers) + "\nwait"], env=shell.environment(), cwd=ROOT, start_new_session=True
    )
    try:
        with shell.running(gateway, "8080/health"):
            wait_for(lambda: samples(shell, UPSTREAM_READY.name) == {local: 1, remote: 1}, 300, "both servers")
            body = {"model": "demo", "prompt": "A tuple is", "max_tokens": 20}

            def sent_by_five() -> dict[str, float]:
                before = samples(shell, UPSTREAM_SENT.name)
                for _ in range(5):
                    url = shell.here("http://127.0.0.1:8080/v1/completions")
                    assert requests.post(url, json=body, timeout=300).ok
                return {name: count - before[name] for name, count in samples(shell, UPSTREAM_SENT.name).items()}

            # A server whose poll is late is passed over until the next one.
            wait_for(lambda: sent_by_five() == {local: 5, remote: 0}, 300, "five requests, all at the local server")
            sent = samples(shell, UPSTREAM_SENT.name)
            first, num_remote = sum(sent.values()), sent[remote]
            for num_loads in (1, 2, 3):
                assert "upstream" in shell.run(load)
                sent = samples(shell, UPSTREAM_SENT.name)
                assert sum(sent.values()) >= first + 60 * num_loads, sent
                if sent[remote] > num_remote:
                    break
            assert sent[local] and sent[remote] > num_remote, sent
    finally:
        subprocess.run(["kill", "-TERM", "--", f"-{running.pid}"], check=False)
        running.wait(120)
        wait_for(lambda: has_no_member(running.pid), 120, "the end of both servers")
