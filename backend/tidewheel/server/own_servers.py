"""Servers of this user on this machine: where their engines are, by the port of their metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidewheel.engine.folder import CURRENT
from tidewheel.private_dir import run_dir_path
from tidewheel.server import ServeError
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.workdir import WorkDir, work_dirs

ENDPOINTS = "endpoints.json"
_decoder = msgspec.json.Decoder(Endpoints)


def announce(work: WorkDir, endpoints: Endpoints) -> None:
    (work.root / ENDPOINTS).write_bytes(msgspec.json.encode(dataclasses.asdict(endpoints)))


@contextlib.contextmanager
def reported(path: Path | None, endpoints: Endpoints) -> Iterator[None]:
    """Keep a file of the ports as long as the block lasts. A reader sees all of it or none."""
    if path is None:
        yield
        return
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        part.write_bytes(msgspec.json.encode(dataclasses.asdict(endpoints)))
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ServeError(f"--ports-file {str(path)!r} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def read_report(path: Path) -> Endpoints | None:
    """Return what `reported` wrote, or None if there is no such file yet."""
    try:
        return _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None


def current_engines_of(metrics_port: int) -> list[Path]:
    """Return the links to the engines that serve, of `tidewheel serve` with the port.

    Without one, return those of a tritonserver that was started by itself.
    """
    for work in work_dirs():
        endpoints = _announced(work)
        if endpoints is not None and endpoints.metrics == metrics_port:
            return sorted(work.run.glob(f"*/{CURRENT}"))
    return sorted(alone.glob(f"*/{CURRENT}")) if _is_own(alone := run_dir_path()) else []


def living(base: Path | None = None) -> list[Endpoints]:
    """Return the endpoints of this user's running servers, on this machine or with work folders in `base`."""
    return [endpoints for work in work_dirs(base) if (endpoints := _announced(work)) is not None]


def control_of(port: int | None) -> Path:
    """Return the control socket of this user's server that has `port` (None: of the only server).

    Raise `ServeError` if no server fits, or several do.
    """
    found = [(endpoints, work) for work in work_dirs() if (endpoints := _announced(work)) is not None]
    if port is not None:
        found = [one for one in found if port in dataclasses.astuple(one[0])]
    if not found:
        raise ServeError("no server of this user runs here" + (f" with port {port}" if port is not None else ""))
    if len(found) > 1:
        ports = ", ".join(str(endpoints.http) for endpoints, _ in found)
        raise ServeError(f"several servers of this user run: name one with --server PORT ({ports})")
    ((endpoints, work),) = found
    if not work.control.exists():
        raise ServeError(
            f"the server at port {endpoints.http} takes no such command: start it with --model-control explicit, "
            "without --open-api model-repository"
        )
    return work.control


def _announced(work: WorkDir) -> Endpoints | None:
    try:
        return _decoder.decode((work.root / ENDPOINTS).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


def _is_own(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid()
    except OSError:
        return False
