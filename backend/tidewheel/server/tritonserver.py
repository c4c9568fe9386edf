import ctypes.util
import importlib.util
import math
import mmap
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidewheel.private_dir import RUN_DIR
from tidewheel.server import ServeError
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.workdir import WorkDir

CONTAINER_BINARY = Path("/opt/tritonserver/bin/tritonserver")
STUB_NAME = "triton_python_backend_stub"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_LINKED_PYTHON = re.compile(rb"libpython(3\.\d+)m?\.so")
SHM_DEFAULT_BYTES = 16 << 20  # per front end, at start
SHM_GROWTH_BYTES = 16 << 20  # fewer remaps for large prompts
MAX_QUEUED_RESPONSES = 1024  # per gRPC stream that is not read
MANY_DESCRIPTORS = 1 << 14  # open files, enough for all clients
GOOD_DESCRIPTORS = 1024  # Triton takes 65 with two models, and one a connection
EXIT_MARGIN_S = 15  # so that the supervisor acts before Triton

ControlMode = Literal["none", "explicit", "poll"]

ClosedApi = Literal["shared-memory", "trace", "logging", "model-repository"]
# Triton tells refused clients this header, so none may be able to send it: HTTP ends a name at a colon; HTTP/2 and
# gRPC allow neither colon, space nor capital. The random value is for servers that read names otherwise.
_IMPOSSIBLE_HEADER = "No header opens it: tidewheel serve --open-api does"
_FLAG = re.compile(r"^\s+(--[a-z0-9-]+)", re.MULTILINE)
BACKEND = "tidewheel"
_PACKAGES = ("tidewheel", "tidewheel_kernels", "tidewheel_client", "tidewheel_process")


@dataclass(frozen=True, slots=True)
class TritonInstall:
    binary: Path
    backends: Path  # holds `python/`, in a container others too
    stub: Path  # for the running Python
    libraries: tuple[Path, ...]  # LD_LIBRARY_PATH
    origin: str


def locate(
    explicit: str | None, environment: Mapping[str, str] = os.environ, container: Path = CONTAINER_BINARY
) -> TritonInstall:
    """Return the server of `explicit`, $TRITONSERVER, the container, PATH or the nvidia-pytriton wheel.

    Raise `ServeError` if none is found.
    """
    for where, path in (("--tritonserver", explicit), ("TRITONSERVER", environment.get("TRITONSERVER"))):
        if not path:
            continue
        binary = Path(path).expanduser().resolve()
        if not (binary.is_file() and os.access(binary, os.X_OK)):
            raise ServeError(f"{where} is {path!r}, no such program: name a tritonserver, or leave it out")
        return _installed(binary, f"named by {where}")
    if container.is_file():
        return _installed(container, "installed in this container")
    if on_path := shutil.which("tritonserver", path=environment.get("PATH")):
        return _installed(Path(on_path).resolve(), "from PATH")
    if (bundled := _wheel_binary()) is not None:
        return _installed(bundled, "from the nvidia-pytriton wheel")
    raise ServeError(
        "no tritonserver found: pip install 'tidewheel[server]' brings one for development; or run in an NVIDIA "
        "Triton container; or name one with --tritonserver PATH"
    )


def _installed(binary: Path, origin: str) -> TritonInstall:
    root = binary.parent.parent
    backends, stubs = root / "backends", root / "python_backend_stubs"
    stub, libraries = backends / "python" / STUB_NAME, root / "lib"
    if stubs.is_dir() and not stub.is_file():  # as in the wheel, a stub for each Python
        stub, libraries = stubs / _PYTHON / STUB_NAME, root.parent.parent / "nvidia_pytriton.libs"
        if not stub.is_file():
            offered = ", ".join(sorted(path.name for path in stubs.glob("3.*")))
            raise ServeError(f"nvidia-pytriton has no stub for Python {_PYTHON}, only for {offered}: use one of them")
    for part in (backends / "python" / "libtriton_python.so", stub):
        if not part.is_file():
            raise ServeError(f"{binary} has no Python backend ({part} is missing): add it, or name another server")
    with stub.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ServeError(f"{stub} is empty: install the server again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _LINKED_PYTHON.search(content)
            linked = found[1].decode() if found is not None else _PYTHON
    if linked != _PYTHON:
        raise ServeError(
            f"{stub} is built for Python {linked}, this is Python {_PYTHON}: install tidewheel with Python {linked}"
        )
    return TritonInstall(binary, backends, stub, (libraries, *_python_library_folders()), origin)


def _wheel_binary() -> Path | None:
    spec = importlib.util.find_spec("pytriton")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    binary = folder and folder / "tritonserver" / "bin" / "tritonserver"
    return binary if binary is not None and binary.is_file() else None


def _python_library_folders() -> list[Path]:
    library = f"libpython{_PYTHON}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"):
        if folder and (Path(folder) / library).is_file():
            return [Path(folder)]
    if ctypes.util.find_library(f"python{_PYTHON}") is None:
        raise ServeError(
            f"this Python has no {library}, which Triton's Python stub needs: use a Python built with "
            f"--enable-shared, or install the system's libpython{_PYTHON}"
        )
    return []


def command(
    install: TritonInstall,
    repository: Path,
    endpoints: Endpoints,
    work: WorkDir,
    *,
    drain_s: float,
    flags: frozenset[str],  # known to this tritonserver
    opened: Collection[ClosedApi] = (),
    extra: Sequence[str] = (),
) -> list[str]:
    return [
        str(install.binary),
        f"--model-repository={repository}",
        f"--backend-directory={work.backends}",
        *(f"--{name}-address={endpoints.host}" for name in ("http", "grpc", "metrics")),
        *(f"--{name}-port={getattr(endpoints, name)}" for name in ("http", "grpc", "metrics")),
        f"--backend-config=python,shm-region-prefix-name={work.shm_prefix}",
        f"--backend-config=python,shm-default-byte-size={SHM_DEFAULT_BYTES}",
        f"--backend-config=python,shm-growth-byte-size={SHM_GROWTH_BYTES}",
        f"--exit-timeout-secs={math.ceil(drain_s) + EXIT_MARGIN_S}",
        *_supported(flags, opened),
        *extra,
    ]


def control_flags(mode: ControlMode, models: Sequence[str] = (), poll_s: int | None = None) -> list[str]:
    """Return Triton's flags of a model control mode. In mode `explicit` Triton starts with `models` (none: all)."""
    flags = [f"--model-control-mode={mode}"]
    if mode == "explicit":
        flags += [f"--load-model={name}" for name in models or ("*",)]
    if poll_s is not None:
        flags.append(f"--repository-poll-secs={poll_s}")
    return flags


def environment(install: TritonInstall, work: WorkDir, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    env = dict(base)
    env[RUN_DIR] = str(work.run)
    env["LD_LIBRARY_PATH"] = _joined([str(path) for path in install.libraries], base.get("LD_LIBRARY_PATH"))
    env["PYTHONPATH"] = _joined(python_path(), base.get("PYTHONPATH"))
    # A stub's Python takes its prefix from the first `python3`.
    env["PATH"] = _joined([str(Path(sys.executable).parent)], base.get("PATH"))
    env["TIDEWHEEL_PYTHON"] = sys.executable
    env["PYTHONUNBUFFERED"] = "1"
    # torch makes this folder on import, by default at a predictable place.
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(work.root / "inductor"))
    # Front ends tokenise on their own threads.
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("OPENBLAS_NUM_THREADS", "1")
    return env


def known_flags(install: TritonInstall, env: Mapping[str, str]) -> frozenset[str]:
    """Return the flags in tritonserver's help. Raise `ServeError` if it does not run."""
    try:
        done = subprocess.run(  # noqa: S603 - the located program
            [str(install.binary), "--help"],
            env=dict(env),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServeError(f"{install.binary} does not run: {error}") from None
    found = frozenset(_FLAG.findall(done.stdout + done.stderr))
    if "--model-repository" not in found:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ServeError(f"{install.binary} does not run: {last[0]}")
    return found


def _supported(flags: frozenset[str], opened: Collection[ClosedApi]) -> list[str]:
    closed = ",".join(api for api in typing.get_args(ClosedApi) if api not in opened)
    restriction = f"{closed}:{_IMPOSSIBLE_HEADER}={secrets.token_hex(16)}"
    wanted = {
        "--allow-client-shm": "true" if "shared-memory" in opened else "false",
        "--allow-sagemaker": "false",
        "--allow-vertex-ai": "false",
        "--grpc-max-response-pool-size": str(MAX_QUEUED_RESPONSES),
        "--grpc-infer-allocation-pool-size": "0",  # each would keep the memory of its largest request
    }
    if closed:
        wanted |= dict.fromkeys(("--http-restricted-api", "--grpc-restricted-protocol"), restriction)
    if not Path("/dev/nvidiactl").exists():
        wanted |= {"--allow-gpu-metrics": "false", "--pinned-memory-pool-byte-size": "0"}
    return [f"{flag}={value}" for flag, value in wanted.items() if flag in flags]


def _joined(paths: Sequence[str], rest: str | None) -> str:
    return os.pathsep.join([*paths, *([rest] if rest else [])])


def assemble(install: TritonInstall, target: Path) -> Path:
    target.mkdir(parents=True)
    for backend in install.backends.iterdir():
        if backend.name not in ("python", BACKEND):
            (target / backend.name).symlink_to(backend)
    python = target / "python"
    python.mkdir()
    for part in (install.backends / "python").iterdir():
        if part.suffix == ".so":
            shutil.copy2(part, python)  # Triton refuses a real path outside the folder
        elif part.name not in (STUB_NAME, "__pycache__"):
            (python / part.name).symlink_to(part)
    (python / STUB_NAME).symlink_to(install.stub)
    (target / BACKEND).symlink_to(package_folder(BACKEND))
    return target


def package_folder(name: str) -> Path:
    """Return a package's folder without importing it. Raise `ServeError` if it is not installed."""
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    folder = next((Path(place) for place in places or () if Path(place).is_dir()), None)
    if folder is None:
        raise ServeError(f"the package {name} is not installed: install tidewheel again")
    return folder.resolve()


def python_path() -> list[str]:
    """Return the PYTHONPATH with which Triton's stub imports what this Python imports."""
    roots = [package_folder(name).parent for name in _PACKAGES]
    site = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]
    return list(dict.fromkeys(str(path) for path in (*roots, *site)))
