"""The command, where there is nothing to show or no way to show it."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest

from support.triton.serving import free_ports
from tidewheel.cli.main import main
from tidewheel.health_endpoint import READY, HealthEndpoint
from tidewheel.server import workdir
from tidewheel.server.endpoints import Endpoints


def pages(port: int) -> list[str]:
    return ["--metrics-url", f"http://127.0.0.1:{port}/metrics", "--health-url", f"http://127.0.0.1:{port}/ready"]


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_without_an_address_it_finds_the_server_of_this_user(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    one, other = (Endpoints(metrics=port, health=number) for number in (1, 2))
    monkeypatch.setattr(workdir, "running_servers", lambda: [(None, one)])
    assert main(["top", "--once"]) == 2
    assert f"no server answers at http://127.0.0.1:{port}/metrics" in only_line(capsys)
    monkeypatch.setattr(workdir, "running_servers", lambda: [(None, one), (None, other)])
    assert main(["top", "--once"]) == 2
    text = capsys.readouterr().err
    assert text.count(f"tidewheel top --metrics-url http://127.0.0.1:{port}/metrics") == 2


@pytest.mark.parametrize("how", [["--once"], ["--json"]])
def test_no_server(capsys: pytest.CaptureFixture[str], how: list[str]) -> None:
    (port,) = free_ports(1)
    assert main(["top", *how, *pages(port)]) == 2
    line = only_line(capsys)
    assert f"no server answers at http://127.0.0.1:{port}/metrics" in line
    assert "start a server with 'tidewheel serve', or name its addresses with --metrics-url" in line


def test_a_page_without_figures(capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = HealthEndpoint("127.0.0.1", 0, lambda: READY)
    try:
        assert main(["top", "--once", *pages(endpoint.port)]) == 2
    finally:
        endpoint.close()
    assert "has no figures of tidewheel: no model of this backend is loaded, or all have" in only_line(capsys)


def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--metrics-url", "gpu1:8002"]) == 2
    assert "'gpu1:8002' is no address of a server" in only_line(capsys)


def test_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *pages(1)]) == 2
    assert "this is no terminal: use --once or --json" in only_line(capsys)


def test_without_the_package_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_textual(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == "textual":
            raise ModuleNotFoundError("No module named 'textual'", name="textual")
        return real(name, *args)

    monkeypatch.delitem(sys.modules, "tidewheel.top.terminal_app", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_textual)
    assert main(["top", *pages(1)]) == 2
    assert "the package textual is not installed: pip install 'tidewheel[top]', or use --once" in only_line(capsys)
