"""Engines of this user's servers are found by the port of their metrics, and those of others are not."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tidewheel.engine.folder import CURRENT
from tidewheel.private_dir import RUN_DIR, read_value, write_value
from tidewheel.server import ServeError, workdir
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.workdir import (
    CLUSTER,
    ENDPOINTS,
    WorkDir,
    control_of,
    current_engines_of,
    running_servers,
    work_dir,
)
from tidewheel_process.locked_folder import LOCK


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "base"))
    (tmp_path / "base").mkdir(mode=0o700)
    return tmp_path / "base"


def add_engine(run: Path, name: str = "demo-1") -> Path:
    (run / name / "a").mkdir(parents=True)
    (run / name / CURRENT).symlink_to("a")
    return run / name / CURRENT


def seen_from(base: Path, port: int) -> list[Path]:
    """Return what a process with another run folder than the server's sees."""
    os.environ[RUN_DIR] = str(base)
    return current_engines_of(port)


def test_a_server_is_found_by_its_port(base: Path, tmp_path: Path) -> None:
    with work_dir(base, tmp_path) as one:
        write_value(one.endpoints_file, Endpoints(metrics=8002))
        link = add_engine(one.run)
        os.environ[RUN_DIR] = str(base)
        with work_dir(base, tmp_path) as other:
            write_value(other.endpoints_file, Endpoints(metrics=9002))
            add_engine(other.run, "other-1")
            assert seen_from(base, 8002) == [link]
            assert seen_from(base, 9002) == [other.run / "other-1" / CURRENT]
            assert seen_from(base, 7002) == []


def test_living_servers_are_listed(base: Path, tmp_path: Path) -> None:
    assert running_servers() == []
    with work_dir(base, tmp_path) as one:
        write_value(one.endpoints_file, Endpoints(metrics=8002))
        os.environ[RUN_DIR] = str(base)
        with work_dir(base, tmp_path):  # has announced nothing yet
            os.environ[RUN_DIR] = str(base)
            assert running_servers() == [(one, Endpoints(metrics=8002))]


def test_servers_of_a_cluster_are_listed(base: Path, tmp_path: Path) -> None:
    run = WorkDir(base / CLUSTER).run
    with work_dir(run, tmp_path) as one:
        write_value(one.endpoints_file, Endpoints(metrics=8002))
        os.environ[RUN_DIR] = str(base)
        assert running_servers() == running_servers(run) == [(one, Endpoints(metrics=8002))]
        assert running_servers(base) == []


def test_the_socket_for_commands_is_that_of_one_server(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="no server of this user runs here"):
        control_of(None)
    with work_dir(base, tmp_path) as one:
        write_value(one.endpoints_file, Endpoints(http=8000, grpc=8001))
        os.environ[RUN_DIR] = str(base)
        with pytest.raises(
            ServeError, match="port 8000 takes no such command: start it with --model-control explicit"
        ):
            control_of(None)
        one.control.touch()
        assert control_of(None) == control_of(8001) == one.control
        with pytest.raises(ServeError, match="no server of this user runs here with port 9001"):
            control_of(9001)
        with work_dir(base, tmp_path) as other:
            write_value(other.endpoints_file, Endpoints(http=9000, grpc=9001))
            other.control.touch()
            os.environ[RUN_DIR] = str(base)
            assert control_of(9001) == other.control
            with pytest.raises(ServeError, match=r"name one with --server PORT \((8000, 9000|9000, 8000)\)"):
                control_of(None)


def test_a_dead_server_is_not_found(base: Path) -> None:
    root = base / "serve-dead"
    work = WorkDir(root)
    add_engine(work.run)
    (root / LOCK).touch()
    write_value(work.endpoints_file, Endpoints(metrics=8002))
    assert current_engines_of(8002) == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"metrics": "x"}', b"[]"])
def test_a_file_that_cannot_be_read(base: Path, tmp_path: Path, content: bytes) -> None:
    with work_dir(base, tmp_path) as work:
        add_engine(work.run)
        (work.root / ENDPOINTS).write_bytes(content)
        assert seen_from(base, 8002) == []


def test_a_tritonserver_without_serve(base: Path) -> None:
    link = add_engine(base)
    assert current_engines_of(8002) == [link]


def test_folders_are_closed_to_others_and_theirs_are_not_read(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with work_dir(base, tmp_path) as work:
        write_value(work.endpoints_file, Endpoints(metrics=8002))
        add_engine(work.run)
        assert stat.S_IMODE(work.root.stat().st_mode) == stat.S_IMODE(work.run.stat().st_mode) == 0o700
        assert seen_from(base, 8002)
        monkeypatch.setattr(workdir.os, "getuid", lambda: os.geteuid() + 1)
        assert seen_from(base, 8002) == []
    add_engine(base)
    assert current_engines_of(8002) == []


def test_ports_are_reported_while_the_server_lives(tmp_path: Path) -> None:
    path, endpoints = tmp_path / "ports.json", Endpoints(http=8000, grpc=8001)
    assert read_value(path, Endpoints) is None
    with workdir.ports_file(path, endpoints):
        assert read_value(path, Endpoints) == endpoints
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ServeError, match=r"--ports-file .* cannot be written"):
        workdir.ports_file(tmp_path / "none" / "ports", endpoints).__enter__()
