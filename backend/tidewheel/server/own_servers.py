"""Servers of this user on this machine: where their engines are, by the port of their metrics."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import msgspec

from tidewheel.engine.folder import CURRENT
from tidewheel.private_dir import run_dir_path
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.workdir import RUN_DIR, WorkDir, work_dirs

ENDPOINTS = "endpoints.json"
_decoder = msgspec.json.Decoder(Endpoints)


def announce(work: WorkDir, endpoints: Endpoints) -> None:
    (work.root / ENDPOINTS).write_bytes(msgspec.json.encode(dataclasses.asdict(endpoints)))


def current_engines_of(metrics_port: int) -> list[Path]:
    """Return the links to the engines that serve, of `tidewheel serve` with the port.

    Without one, return those of a tritonserver that was started by itself.
    """
    base = Path(os.environ.get(RUN_DIR) or tempfile.gettempdir()).absolute()
    for work in work_dirs(base):
        if _metrics_port(work) == metrics_port:
            return sorted(work.run.glob(f"*/{CURRENT}"))
    return sorted(alone.glob(f"*/{CURRENT}")) if _is_own(alone := run_dir_path()) else []


def _metrics_port(work: WorkDir) -> int | None:
    try:
        return _decoder.decode((work.root / ENDPOINTS).read_bytes()).metrics
    except (OSError, msgspec.DecodeError):
        return None


def _is_own(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid()
    except OSError:
        return False
