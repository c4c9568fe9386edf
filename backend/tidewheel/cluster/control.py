"""Start, ask, change and end the cluster of this user on this machine."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import psutil

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_place import ClusterPlace, free_port, in_use
from tidewheel.cluster.cluster_settings import ClusterSettings
from tidewheel.server import ServeError
from tidewheel.server.endpoints import check_keys
from tidewheel.server.model_control import ask
from tidewheel_process import process_tree
from tidewheel_process.handle import ProcessHandle
from tidewheel_process.locked_folder import LOCK

_END_S = 30.0  # beyond the drain
_MODULE = "tidewheel.cluster.head"


def up(settings: ClusterSettings, note: Callable[[str], None]) -> int:
    """Return the gateway's port when all replicas serve. Raise `ClusterError`, with nothing left."""
    place = _checked(settings)
    head = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(settings).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert head.stdout is not None
    try:
        return _port(head.stdout, note)
    except BaseException:
        _end(place, head.pid, settings.drain_s)
        head.wait()
        raise


def status(place: ClusterPlace) -> dict[str, Any]:
    """Raise `ClusterError` if there is none."""
    _check_up(place)
    return ask(place.control, {"do": "status"}, ClusterError)


def scale(place: ClusterPlace, replicas: int) -> dict[str, Any]:
    """Raise `ClusterError` if that many cannot be placed."""
    _check_up(place)
    return ask(place.control, {"do": "scale", "replicas": replicas}, ClusterError)


def down(place: ClusterPlace) -> None:
    """End it, or what a killed one has left. Raise `ClusterError` if there is none."""
    if not place.root.exists() and not place.why_it_ended():
        raise ClusterError(f"no cluster of yours is up: there is no {place.root}")
    pid = _head(place)
    if pid is None:
        place.remove()
    else:
        _end(place, pid, 86_400.0)
        place.last_words.unlink(missing_ok=True)


def _checked(settings: ClusterSettings) -> ClusterPlace:
    """Check what can be known before anything starts."""
    if importlib.util.find_spec("ray") is None:
        raise ClusterError("Ray is not installed: pip install 'tidewheel[ray]'")
    settings.check()
    try:
        check_keys(settings.host, Path(settings.api_keys) if settings.api_keys else None)
    except ServeError as error:
        raise ClusterError(str(error)) from None
    place = ClusterPlace.here()
    place.check_path()
    if place.is_up():
        raise ClusterError(in_use(place))
    free_port(settings.host, settings.openai_port)
    return place


def _port(lines: BinaryIO | Any, note: Callable[[str], None]) -> int:
    for line in lines:
        match msgspec.json.decode(line):
            case {"ready": int(port)}:
                return port
            case {"error": str(reason)}:
                raise ClusterError(reason)
            case {"stage": str(stage)}:
                note(stage)
    raise ClusterError("the process of the cluster ended at its start")


def _check_up(place: ClusterPlace) -> None:
    if not place.is_up():
        why = place.why_it_ended()
        raise ClusterError(f"no cluster of yours is up: {why or 'start one with tidewheel cluster up'}")


def _head(place: ClusterPlace) -> int | None:
    """Return the process that holds the place."""
    if not place.is_up():
        return None
    found = (pid for pid in psutil.pids() if _MODULE in process_tree.arguments(pid))
    return next((pid for pid in found if _holds(pid, place)), None)


def _holds(pid: int, place: ClusterPlace) -> bool:
    try:
        return any(one.samefile(place.root / LOCK) for one in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _end(place: ClusterPlace, pid: int, limit_s: float) -> None:
    handle = ProcessHandle(pid)
    handle.end(signal.SIGTERM, limit_s + _END_S)
    handle.close()
    limit = time.monotonic() + _END_S
    while place.root.exists() and time.monotonic() < limit:  # its guard removes what is left
        time.sleep(0.05)
