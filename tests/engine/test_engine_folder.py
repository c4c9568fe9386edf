"""The files of an engine folder: names, rights, status, and the memory of deaths."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engine.targets import new_target
from tidewheel.config import EngineConfig
from tidewheel.engine.folder import (
    DEATHS,
    LOG,
    STATUS,
    Status,
    engine_dir,
    last_log_line,
    read_status,
    settings_digest,
    socket_address,
    write_status,
)
from tidewheel.engine.launcher import SPINS, python_executable, record_death, spawn_engine
from tidewheel.errors import ConfigError
from tidewheel.private_dir import run_dir
from tidewheel_process.child import start_ticks


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tw-") as parent:  # pytest's own are too long for a socket
        monkeypatch.setenv("TIDEWHEEL_RUN_DIR", f"{parent}/run")
        yield Path(parent) / "run"


def test_folders_are_private(base: Path) -> None:
    folder = engine_dir(Path("repository"), "demo")
    assert folder.parent == base == run_dir()
    assert {path.stat().st_mode & 0o777 for path in (base, folder)} == {0o700}


def test_one_folder_for_each_model_of_each_repository(base: Path, tmp_path: Path) -> None:
    names = [
        engine_dir(repository, model) for repository in (tmp_path, tmp_path / "b") for model in ("demo", "other")
    ]
    assert len(set(names)) == 4
    assert engine_dir(tmp_path, "demo") == names[0]
    assert engine_dir(tmp_path / "b" / "..", "demo") == names[0]


def test_odd_model_names_stay_inside_the_run_folder(base: Path) -> None:
    folder = engine_dir(Path("r"), "../../etc/" + "x" * 200)
    assert folder.parent == base and len(folder.name) <= 27


def test_a_folder_that_others_can_read_is_refused(base: Path) -> None:
    base.mkdir(mode=0o755)
    base.chmod(0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        run_dir()


def test_a_link_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="must be a folder that belongs to user"):
        run_dir()


def test_socket_paths_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_RUN_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(ConfigError, match=r"bytes and may have 107: set TIDEWHEEL_RUN_DIR"):
        engine_dir(Path("r"), "demo")


def test_socket_address(base: Path) -> None:
    assert socket_address(base) == f"ipc://{base}/engine.sock"


def status(**fields: object) -> Status:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    values = {"state": "ready", "pid": os.getpid(), "start_ticks": ticks, "settings": {"model": "m"}, **fields}
    return Status(**values)  # type: ignore[arg-type]


def test_status_survives_the_file(tmp_path: Path) -> None:
    write_status(tmp_path, status(stage="weights", fraction=0.5))
    found = read_status(tmp_path)
    assert found is not None and found.written_ns > 0
    assert (found.state, found.stage, found.fraction, found.settings) == ("ready", "weights", 0.5, {"model": "m"})
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"state": "dancing"}', b"\xff\xfe"])
def test_unreadable_status_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATUS).write_bytes(content)
    assert read_status(tmp_path) is None


def test_no_status_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None


def test_alive_means_this_very_process() -> None:
    assert status().is_alive
    assert not status(start_ticks=1).is_alive, "another process with the same number"
    assert not status(state="stopped").is_alive


def test_digest_depends_on_values_and_not_on_order() -> None:
    assert settings_digest({"a": 1, "b": 2}) == settings_digest({"b": 2, "a": 1})
    assert settings_digest({"a": 1}) != settings_digest({"a": 2})


def test_last_log_line(tmp_path: Path) -> None:
    assert last_log_line(tmp_path) == ""
    (tmp_path / LOG).write_text("first\n" + "x" * 10_000 + "\n  the end  \n\n")
    assert last_log_line(tmp_path) == "the end"
    (tmp_path / LOG).write_text("2026-11-21 09:34:20,266 ERROR engine died: OSError: no\n")
    assert last_log_line(tmp_path) == "engine died: OSError: no"
    (tmp_path / LOG).write_bytes(b"\xff" * 500)
    assert len(last_log_line(tmp_path)) == 300


def test_deaths_are_remembered_once_each(tmp_path: Path) -> None:
    first, second = status(pid=1, start_ticks=10), status(pid=1, start_ticks=11)
    record_death(tmp_path, first, window_s=60)
    assert len(record_death(tmp_path, first, window_s=60)) == 1
    assert record_death(tmp_path, second, window_s=60).keys() == {"1 10", "1 11"}


def test_old_and_impossible_deaths_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    record_death(tmp_path, status(pid=1), window_s=60)
    now = 1059.0
    assert len(record_death(tmp_path, status(pid=2), window_s=60)) == 2
    now = 1061.0
    assert sorted(record_death(tmp_path, status(pid=3), window_s=60).values()) == [1059.0, 1061.0]
    now = 5.0  # the machine has booted since
    assert list(record_death(tmp_path, status(pid=4), window_s=60).values()) == [5.0]


def test_an_old_death_that_is_told_again_happened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next start, some time after it, would move on for ever."""
    times = iter((1000.0, 1061.0, 1062.0))
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    record_death(tmp_path, status(pid=1), window_s=60)
    assert list(record_death(tmp_path, status(pid=1), window_s=60).values()) == [1061.0]
    assert list(record_death(tmp_path, status(pid=1), window_s=60).values()) == [1061.0]


def test_unreadable_memory_is_no_memory(tmp_path: Path) -> None:
    (tmp_path / DEATHS).write_text("{")
    assert len(record_death(tmp_path, status(), window_s=60)) == 1


def test_the_interpreter_is_found_where_python_is_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEWHEEL_PYTHON", raising=False)
    assert python_executable() == sys.executable
    monkeypatch.setattr(sys, "executable", "/opt/tritonserver/backends/python/triton_python_backend_stub")
    found = subprocess.run([python_executable(), "-V"], capture_output=True, text=True, check=True)
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in found.stdout
    monkeypatch.setenv("TIDEWHEEL_PYTHON", "/bin/sh")
    assert python_executable() == "/bin/sh"


def test_no_interpreter_is_an_error_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEWHEEL_PYTHON", raising=False)
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="set TIDEWHEEL_PYTHON"):
        python_executable()


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "")],
)
def test_the_threads_of_an_engine_sleep_soon_unless_told_otherwise(
    base: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    folder = engine_dir(Path("repository"), "demo")
    command = [sys.executable, "-c", "import os; print('spins', os.environ.get('GOMP_SPINCOUNT', ''))"]
    spawn_engine(command, new_target(folder, EngineConfig(model="none"))).wait()
    assert last_log_line(folder) == f"spins {expected}".strip()
