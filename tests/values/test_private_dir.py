from __future__ import annotations

import os
import tempfile
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tidewheel.private_dir import LONGEST_RUN_DIR, RUN_DIR, close_shared_memory, run_dir_path


def test_shared_memory_of_this_process_is_closed_to_others() -> None:
    memory = SharedMemory(create=True, size=4096)
    path = Path("/dev/shm", memory.name)
    try:
        path.chmod(0o644)
        close_shared_memory()
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.parametrize(("temporary", "parent"), [("/scratch", "/scratch"), ("/" + "t" * 89, "/tmp")])
def test_a_temporary_directory_with_a_long_name_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, temporary: str, parent: str
) -> None:
    monkeypatch.delenv(RUN_DIR, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    assert run_dir_path() == Path(parent, f"tidewheel-{os.getuid()}")
    monkeypatch.setenv(RUN_DIR, "/" + "r" * 89)
    assert run_dir_path() == Path("/" + "r" * 89)


def test_no_number_of_a_user_is_too_long() -> None:
    assert len(f"/tmp/tidewheel-{2**32 - 2}") <= LONGEST_RUN_DIR
