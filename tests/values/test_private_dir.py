from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from tidewheel.private_dir import close_shared_memory


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
