"""`tidewheel cluster` where nothing can start: one line, exit code 2, and nothing is left."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.triton.serving import REPOSITORY, wait_for
from tidewheel.cli.cluster import _show
from tidewheel.cli.main import main
from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_place import ClusterPlace
from tidewheel.cluster.ray_watch import RayWatch
from tidewheel.engine.folder import SOCKET, engine_dir, settings_digest
from tidewheel.private_dir import LONGEST_RUN_DIR, MAX_SOCKET_PATH
from tidewheel.server.model_control import MAX_LINE, ControlSocket, ask
from tidewheel.server.workdir import work_dir
from tidewheel_process.process_tree import children, name

UP = ("cluster", "up", "--model-repository", str(REPOSITORY))


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # Ray is there
    monkeypatch.setattr(ClusterPlace, "check_path", lambda place: None)  # of pytest, whose folders have long names
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
    assert f"port {taken} (--openai-port): Address already in use" in line
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
    place = ClusterPlace.here()
    place.root.mkdir(parents=True)
    (place.root / "lock").touch()
    place.token.write_text("secret")
    assert main(("cluster", "down")) == 0
    assert list(run_dir.iterdir()) == []


def test_a_cluster_that_ended_says_why_until_down(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir.mkdir()
    ClusterPlace.here().last_words.write_text("Ray's raylet died")
    for arguments in (["status"], ["scale", "2"]):
        assert line_of(capsys, "cluster", *arguments) == "no cluster of yours is up: Ray's raylet died"
    assert main(("cluster", "down")) == 0
    assert list(run_dir.iterdir()) == []


def test_another_start_forgets_why_the_last_one_ended(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    place = ClusterPlace.here()
    place.last_words.write_text("Ray's raylet died")
    with place.held():
        assert place.why_it_ended() == ""


def test_deaths_of_ray_are_seen(tmp_path: Path) -> None:
    def start(name: str) -> subprocess.Popen[bytes]:
        (tmp_path / name).symlink_to(shutil.which("sleep") or "")
        return subprocess.Popen([tmp_path / name, "600"])

    with start("gcs_server") as store, start("raylet") as raylet:
        try:
            wait_for(lambda: {"gcs_server", "raylet"} <= {name(one) for one in children(os.getpid())}, 10, "both")
            watch = RayWatch()
            assert (watch.look(), watch.has_died) == (False, False)
            watch.check()
            store.kill()
            wait_for(watch.look, 10, "a death")
            assert (watch.look(), watch.has_died, watch.has_ended_all) == (False, True, False)
            with pytest.raises(ClusterError, match="gcs_server died: nothing is started again"):
                watch.check()
            raylet.kill()
            wait_for(watch.look, 10, "another death")
            assert watch.has_ended_all
            assert watch.reason.startswith("Ray's raylet died")
        finally:
            store.kill()
            raylet.kill()


def test_one_process_holds_a_place(run_dir: Path) -> None:
    place = ClusterPlace.here()
    with place.held():
        assert place.is_up()
        with pytest.raises(ClusterError, match="a cluster of yours is up"), ClusterPlace(place.root).held():
            pass
    assert not place.is_up()


def test_a_long_path_is_refused() -> None:
    with pytest.raises(ClusterError, match="by 17 bytes"):
        ClusterPlace(Path("/" + "a" * 51)).check_path()
    ClusterPlace(Path("/" + "a" * (LONGEST_RUN_DIR - 1), "cluster")).check_path()


def test_no_socket_of_a_cluster_has_a_longer_path_than_is_checked(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of the longest kind: those of a replica's server, and of a model."""
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(short_path))
    place = ClusterPlace.here()
    with place.held(), work_dir() as work:
        folder = engine_dir(work.repository, "m" * 200) / settings_digest({})
        room = MAX_SOCKET_PATH - len(str(folder / SOCKET))
    place = ClusterPlace(Path(f"{place.root}{'x' * room}"))
    place.check_path()
    with pytest.raises(ClusterError, match="by 1 bytes"):
        ClusterPlace(Path(f"{place.root}x")).check_path()


def test_commands_are_answered_in_turn(tmp_path: Path) -> None:
    def handle(command: dict[str, object]) -> dict[str, object]:
        if command["do"] == "fail":
            raise ClusterError("it cannot")
        return {"did": command["do"]} if command["do"] != "crash" else {"did": 1 // 0}

    path = tmp_path / "c"
    with ControlSocket(path, handle, ClusterError):
        assert path.stat().st_mode & 0o777 == 0o600
        assert ask(path, {"do": "this"}, ClusterError) == {"did": "this"}
        with pytest.raises(ClusterError, match="it cannot"):
            ask(path, {"do": "fail"}, ClusterError)
        with pytest.raises(ClusterError, match="ZeroDivisionError"):
            ask(path, {"do": "crash"}, ClusterError)
        with pytest.raises(ClusterError):
            ask(path, {"do": "x" * MAX_LINE}, ClusterError)
    with pytest.raises(ClusterError, match="does not answer"):
        ask(path, {"do": "this"}, ClusterError)


def test_status_says_what_each_replica_has_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    new = {"running": 0.0, "waiting": 0.0, "kv_use": 0.0, "is_ready": 1.0, "age_s": 83.4, "restarts": 0.0}
    busy = {"running": 3.0, "waiting": 2.0, "kv_use": 0.126, "queue_s_critical": 0.25, "queue_s_low": 7.0}
    busy |= {"is_ready": 0.0, "age_s": 90_000.0, "restarts": 2.0}
    replicas = {"h:2": busy, "h:1": new, "h:3": {}}
    _show(
        {"state": "RUNNING", "wanted": "3", "replicas": {"RUNNING": 3}, "message": "", "port": 8, "figures": replicas}
    )
    assert capsys.readouterr().out.splitlines() == [
        "running: 3 replicas wanted, 3 running",
        "OpenAI API at port 8",
        "  h:1: ready, up 0:01:23, restarts 0; 0 running, 0 waiting, 0% of its cache in use",
        "  h:2: not ready, up 1 day, 1:00:00, restarts 2; "
        "3 running, 2 waiting (the oldest CRITICAL for 0.2 s, LOW for 7.0 s), 13% of its cache in use",
        "  h:3: it has told nothing yet",
    ]
