"""`tidewheel cluster` where nothing can start: one line, exit code 2, and nothing is left."""

from __future__ import annotations

import importlib.util
import itertools
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.triton.serving import REPOSITORY
from tidewheel.cli.cluster import _show
from tidewheel.cli.main import main
from tidewheel.cluster import ClusterError, control
from tidewheel.cluster.cluster_settings import ClusterSettings
from tidewheel.cluster.control import ClusterFolder, ClusterStatus
from tidewheel.engine.folder import SOCKET, engine_dir, settings_digest
from tidewheel.private_dir import LONGEST_RUN_DIR, MAX_SOCKET_PATH
from tidewheel.server.workdir import work_dir

UP = ("cluster", "up", "--model-repository", str(REPOSITORY))


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # Ray is there
    monkeypatch.setattr(ClusterFolder, "check_path", lambda folder: None)  # of pytest, whose folders have long names
    return tmp_path / "run"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        yield int(one.getsockname()[1])


def line_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("tidewheel: error: ")


def test_a_port_in_use(run_dir: Path, capsys: pytest.CaptureFixture[str], taken: int) -> None:
    line = line_of(capsys, *UP, "--openai-port", str(taken))
    assert f"port {taken} of 127.0.0.1 is in use: choose another with --openai-port" in line
    assert not run_dir.exists()


def test_a_network_needs_keys(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no --api-keys" in line_of(capsys, *UP, "--host", "0.0.0.0")


def test_ray_is_an_extra(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert line_of(capsys, *UP) == "Ray is not installed: pip install 'tidewheel[ray]'"


def test_wrong_numbers(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert line_of(capsys, *UP, "--replicas", "0") == "replicas is 0: it must be 1 to 1024, or max_replicas be given"


@pytest.mark.parametrize("arguments", [["status"], ["scale", "2"], ["down"]], ids=lambda one: one[0])
def test_no_cluster(run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert line_of(capsys, "cluster", *arguments).startswith("no cluster of yours is up")
    assert not run_dir.exists()


def test_down_removes_what_a_killed_one_left(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ClusterFolder.here()
    folder.root.mkdir(parents=True)
    (folder.root / "lock").touch()
    folder.token.write_text("secret")
    assert main(("cluster", "down")) == 0
    assert list(run_dir.iterdir()) == []


def test_a_cluster_that_ended_says_why_until_down(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ClusterFolder.here()
    logs = folder.ray / "session_2026-11-26_02-45-17_199565_27048" / "logs"
    logs.mkdir(parents=True)
    (folder.root / "lock").touch()
    (logs / "ray_process_exit.log").write_text(
        "2026-11-26 02:45:23,441 ERROR scripts.py:100 -- Some Ray subprocesses exited unexpectedly:\n"
        "  raylet [exit code=-9 (signal 9)]\n"
    )
    for arguments in (["status"], ["scale", "2"]):
        line = line_of(capsys, "cluster", *arguments)
        assert line.startswith("no cluster of yours is up: Ray's raylet died (-9 (signal 9))")
    assert main(("cluster", "down")) == 0
    assert list(run_dir.iterdir()) == []


def test_ray_is_asked_to_be_closed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a token, and nothing of another cluster."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    run_dir.mkdir(mode=0o700)
    folder = ClusterFolder.here()
    with folder.made():
        variables = {name: value for name, value in folder.environment().items() if name.startswith("RAY_")}
        assert "RAY_ADDRESS" not in variables
        assert (variables["RAY_AUTH_MODE"], variables["RAY_AUTH_TOKEN_PATH"]) == ("token", str(folder.token))
        assert folder.token.stat().st_mode & 0o777 == 0o600
        assert len(folder.token.read_text()) == 64


def test_one_process_holds_a_folder(run_dir: Path) -> None:
    folder = ClusterFolder.here()
    with folder.made():
        assert folder.is_up
        with pytest.raises(ClusterError, match="a cluster of yours is up"), ClusterFolder(folder.root).made():
            pass
    assert not folder.is_up


def test_a_start_ends_processes_of_a_folder_that_is_gone(run_dir: Path) -> None:
    folder = ClusterFolder.here()
    with subprocess.Popen(["/bin/sleep", "9"], env={"TIDEWHEEL_RUN_DIR": str(folder.run)}) as left, folder.made():
        assert left.poll() is not None


def test_a_start_beside_another_leaves_that_alone(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ClusterFolder.here()
    with folder.made():
        check, calls = ClusterFolder.check_free, itertools.count()
        monkeypatch.setattr(
            ClusterFolder, "check_free", lambda one: next(calls) and check(one)
        )  # it looked just before
        with pytest.raises(ClusterError, match="a cluster of yours is up"):
            control.up(ClusterSettings(model="a/b", port=0), print)
        assert folder.token.exists()


def test_a_long_path_is_refused() -> None:
    with pytest.raises(ClusterError, match="by 17 bytes"):
        ClusterFolder(Path("/" + "a" * 51)).check_path()
    ClusterFolder(Path("/" + "a" * (LONGEST_RUN_DIR - 1), "cluster")).check_path()


def test_no_socket_of_a_cluster_has_a_longer_path_than_is_checked(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of the longest kind: those of a replica's server, and of a model."""
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(short_path))
    cluster = ClusterFolder.here()
    with cluster.made(), work_dir(cluster.run) as work:
        folder = engine_dir(work.repository, "m" * 200) / settings_digest({})
        room = MAX_SOCKET_PATH - len(str(folder / SOCKET))
    cluster = ClusterFolder(Path(f"{cluster.root}{'x' * room}"))
    cluster.check_path()
    with pytest.raises(ClusterError, match="by 1 bytes"):
        ClusterFolder(Path(f"{cluster.root}x")).check_path()


def test_status_says_what_each_replica_has_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    new = {"running": 0.0, "waiting": 0.0, "kv_use": 0.0, "is_ready": 1.0, "age_s": 83.4, "restarts": 0.0}
    busy = {"running": 3.0, "waiting": 2.0, "kv_use": 0.126, "queue_s_critical": 0.25, "queue_s_low": 7.0}
    busy |= {"is_ready": 0.0, "age_s": 90_000.0, "restarts": 2.0}
    replicas = {"h:2": busy, "h:1": new, "h:3": {}}
    _show(ClusterStatus("RUNNING", "", "3", {"RUNNING": 3}, 8, replicas))
    assert capsys.readouterr().out.splitlines() == [
        "running: 3 replicas wanted, 3 running",
        "OpenAI API at port 8",
        "  h:1: ready, up 0:01:23, restarts 0; 0 running, 0 waiting, 0% of its cache in use",
        "  h:2: not ready, up 1 day, 1:00:00, restarts 2; "
        "3 running, 2 waiting (the oldest CRITICAL for 0.2 s, LOW for 7.0 s), 13% of its cache in use",
        "  h:3: it has told nothing yet",
    ]
