from __future__ import annotations

import ctypes.util
import importlib.util
import mmap
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tidewheel.server import ServeError

CONTAINER_BINARY = Path("/opt/tritonserver/bin/tritonserver")
STUB_NAME = "triton_python_backend_stub"
_LINKED_PYTHON = re.compile(rb"libpython(3\.\d+)m?\.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonInstall:
    binary: Path
    backends: Path  # holds `python/`, in a container others too
    stub: Path  # for the running Python
    libraries: tuple[Path, ...]  # LD_LIBRARY_PATH
    origin: str  # for the start-up notice


def locate(
    explicit: str | None, environment: Mapping[str, str] = os.environ, container: Path = CONTAINER_BINARY
) -> TritonInstall:
    """Return the first found: `explicit`, $TRITONSERVER, the container's, PATH, the nvidia-pytriton wheel.

    Raise `ServeError` if there is none that fits.
    """
    named = {"--tritonserver": explicit, "TRITONSERVER": environment.get("TRITONSERVER")}
    for where, path in named.items():
        if path:
            return _named(where, path)
    if container.is_file():
        return _installed(container, "installed in this container")
    on_path = shutil.which("tritonserver", path=environment.get("PATH"))
    if on_path:
        return _installed(Path(on_path).resolve(), "from PATH")
    wheel = _wheel_folder()
    if wheel is not None:
        return _bundled(wheel)
    raise ServeError(
        "no tritonserver found: pip install 'tidewheel[server]' brings one for development; or run in an NVIDIA "
        "Triton container; or name one with --tritonserver PATH"
    )


def _named(where: str, path: str) -> TritonInstall:
    binary = Path(path).expanduser().resolve()
    if not (binary.is_file() and os.access(binary, os.X_OK)):
        raise ServeError(f"{where} is {path!r}, no such program: name a tritonserver, or leave it out")
    wheel = _wheel_folder()
    if wheel is not None and binary == _wheel_binary(wheel).resolve():
        return _bundled(wheel)
    return _installed(binary, f"named by {where}")


def _installed(binary: Path, origin: str) -> TritonInstall:
    root = binary.parent.parent
    backends = root / "backends"
    stub = backends / "python" / STUB_NAME
    _check_parts(binary, [backends / "python" / "libtriton_python.so", stub])
    _check_stub(stub)
    return TritonInstall(
        binary=binary,
        backends=backends,
        stub=stub,
        libraries=(root / "lib", *_python_library_folders()),
        origin=origin,
    )


def _bundled(package: Path) -> TritonInstall:
    root = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / STUB_NAME
    if not stub.is_file():
        offered = sorted(path.name for path in (root / "python_backend_stubs").glob("3.*"))
        raise ServeError(
            f"nvidia-pytriton has no stub for Python {version}, only for {', '.join(offered)}: use one of these"
        )
    _check_parts(_wheel_binary(package), [root / "backends" / "python" / "libtriton_python.so"])
    return TritonInstall(
        binary=_wheel_binary(package),
        backends=root / "backends",
        stub=stub,
        libraries=(package.parent / "nvidia_pytriton.libs", *_python_library_folders()),
        origin="from the nvidia-pytriton wheel",
    )


def _wheel_folder() -> Path | None:
    spec = importlib.util.find_spec("pytriton")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return folder if folder is not None and _wheel_binary(folder).is_file() else None


def _wheel_binary(package: Path) -> Path:
    return package / "tritonserver" / "bin" / "tritonserver"


def _python_library_folders() -> list[Path]:
    """Return where the stub's libpython is, unless the loader finds it. Raise `ServeError` if there is none."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    library = f"libpython{version}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"):
        if folder and (Path(folder) / library).is_file():
            return [Path(folder)]
    if ctypes.util.find_library(f"python{version}") is None:
        raise ServeError(
            f"this Python has no {library}, which Triton's Python stub needs: use a Python built with "
            f"--enable-shared, or install the system's libpython{version}"
        )
    return []


def _check_parts(binary: Path, parts: Iterable[Path]) -> None:
    for part in parts:
        if not part.is_file():
            raise ServeError(f"{binary} has no Python backend ({part} is missing): add it, or name another server")


def _check_stub(stub: Path) -> None:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    with stub.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ServeError(f"{stub} is empty: install the server again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _LINKED_PYTHON.search(content)
            linked = found[1].decode() if found is not None else running
    if linked != running:
        raise ServeError(
            f"{stub} is built for Python {linked}, this is Python {running}: install tidewheel with Python {linked}"
        )
