from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

import tidewheel
from tidewheel.engine.run_dir import LOG
from tidewheel.engine.status import Status, process_start_ticks, write_status
from tidewheel.errors import ConfigError

MAX_LOG_BYTES = 16 << 20  # a longer log is set aside at the next start


def engine_command() -> list[str]:
    """Return the command that starts an engine, without its arguments."""
    return [python_executable(), "-P", "-m", "tidewheel.engine.process"]


def python_executable() -> str:
    """Return the running interpreter, also where it is embedded in a host program. Raise `ConfigError` if there is
    none.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = (
        os.environ.get("TIDEWHEEL_PYTHON"),
        sys.executable if Path(sys.executable or "").name.startswith("python") else None,
        str(Path(sys.prefix) / "bin" / version),
        shutil.which(version),
    )
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise ConfigError(f"no {version} found to run the engine with: set TIDEWHEEL_PYTHON to one")


def spawn_engine(command: Sequence[str], engine_dir: Path, settings: dict[str, object]) -> subprocess.Popen[bytes]:
    """Start an engine that outlives its front end. Write `status.json`; its output goes to `engine.log`."""
    arguments = [*command, "--engine-dir", str(engine_dir), "--settings", msgspec.json.encode(settings).decode()]
    log_path = engine_dir / LOG
    if log_path.exists() and log_path.stat().st_size > MAX_LOG_BYTES:
        log_path.replace(log_path.with_suffix(".log.1"))
    with log_path.open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=_environment()
        )
    # Reap the process even if its launcher no longer watches it.
    threading.Thread(target=process.wait, name="engine-reaper", daemon=True).start()
    ticks = process_start_ticks(process.pid) or 0  # 0, which no process has, if it has ended
    write_status(engine_dir, Status(state="starting", pid=process.pid, start_ticks=ticks, settings=settings))
    return process


def _environment() -> dict[str, str]:
    package = Path(tidewheel.__file__).parent
    paths = [str(package.parent), *(p for p in sys.path if p and Path(p).is_dir() and Path(p) != package)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
