"""What a file of a model folder may be instead of a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

ODD_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
}


def put_odd_file(path: Path, kind: str) -> None:
    path.unlink()
    ODD_FILES[kind](path)
