from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidewheel.one_shot import shared_tensors


@pytest.fixture(autouse=True)
def shared_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Shared memory of this test alone; return its folder."""
    monkeypatch.setattr(shared_tensors, "_SHARED_MEMORY", tmp_path_factory.mktemp("shm"))
    shared_tensors.folder.cache_clear()
    yield shared_tensors.folder()
    shared_tensors.kept_files.close()
    shared_tensors.folder.cache_clear()
