"""Command line, environment and backend directory of a tritonserver."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from tidewheel.private_dir import RUN_DIR
from tidewheel.server import ServeError
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.locate import STUB_NAME, TritonInstall
from tidewheel.server.workdir import WorkDir

SHM_DEFAULT_BYTES = 16 << 20  # per front end, at start
SHM_GROWTH_BYTES = 16 << 20  # fewer remaps for large prompts
MAX_QUEUED_RESPONSES = 1024  # per gRPC stream that is not read
EXIT_MARGIN_S = 15  # so that the supervisor acts before Triton

ModelControl = Literal["none", "explicit", "poll"]

ClosedApi = Literal["shared-memory", "trace", "logging", "model-repository"]  # unless opened
# Triton asks for this header, and names it to a client that it refuses. All users of the machine see the argument,
# so no client may be able to send it: HTTP ends a name at a colon, and HTTP/2 and gRPC allow neither colon, space nor
# capital in one. The value is random in case that a server reads names in another way.
_IMPOSSIBLE_HEADER = "No header opens it: tidewheel serve --open-api does"
_FLAG = re.compile(r"^\s+(--[a-z0-9-]+)", re.MULTILINE)
BACKEND = "tidewheel"
_PACKAGES = ("tidewheel", "tidewheel_kernels", "tidewheel_client")


def command(
    install: TritonInstall,
    repository: Path,
    endpoints: Endpoints,
    work: WorkDir,
    *,
    drain_s: float,
    flags: frozenset[str],  # known to this tritonserver
    control: Sequence[str] = ("--model-control-mode=none",),
    opened: Collection[ClosedApi] = (),
    extra: Sequence[str] = (),
) -> list[str]:
    return [
        str(install.binary),
        f"--model-repository={repository}",
        f"--backend-directory={work.backends}",
        f"--http-address={endpoints.host}",
        f"--http-port={endpoints.http}",
        f"--grpc-address={endpoints.host}",
        f"--grpc-port={endpoints.grpc}",
        f"--metrics-address={endpoints.host}",
        f"--metrics-port={endpoints.metrics}",
        f"--backend-config=python,shm-region-prefix-name={work.shm_prefix}",
        f"--backend-config=python,shm-default-byte-size={SHM_DEFAULT_BYTES}",
        f"--backend-config=python,shm-growth-byte-size={SHM_GROWTH_BYTES}",
        f"--exit-timeout-secs={math.ceil(drain_s) + EXIT_MARGIN_S}",
        *_hardening(flags, opened),
        *_without_gpu(flags),
        *control,
        *extra,
    ]


def control_flags(mode: ModelControl, models: Sequence[str], poll_s: int | None) -> list[str]:
    """Return the flags for a mode. `models`, or all, are loaded at the start of `explicit`."""
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
    """Return the flags that tritonserver offers. Raise `ServeError` if it does not run."""
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


def _hardening(flags: frozenset[str], opened: Collection[ClosedApi]) -> list[str]:
    closed = ",".join(api for api in typing.get_args(ClosedApi) if api not in opened)
    restriction = f"{closed}:{_IMPOSSIBLE_HEADER}={secrets.token_hex(16)}"
    wanted = {
        "--allow-client-shm": "true" if "shared-memory" in opened else "false",
        "--allow-sagemaker": "false",
        "--allow-vertex-ai": "false",
        "--grpc-max-response-pool-size": str(MAX_QUEUED_RESPONSES),
        "--grpc-infer-allocation-pool-size": "0",  # each of the pool would keep the memory of its largest request
    }
    if closed:
        wanted |= dict.fromkeys(("--http-restricted-api", "--grpc-restricted-protocol"), restriction)
    return [f"{flag}={value}" for flag, value in wanted.items() if flag in flags]


def _without_gpu(flags: frozenset[str]) -> list[str]:
    """Silence Triton's complaints about a missing NVIDIA driver."""
    if Path("/dev/nvidiactl").exists():
        return []
    wanted = {"--allow-gpu-metrics": "false", "--pinned-memory-pool-byte-size": "0"}
    return [f"{flag}={value}" for flag, value in wanted.items() if flag in flags]


def _joined(paths: Sequence[str], rest: str | None) -> str:
    return os.pathsep.join([*paths, *([rest] if rest else [])])


def assemble(install: TritonInstall, target: Path) -> Path:
    """Make a backend directory of links to the installed backends, and return it."""
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
    """Return the folder of a package, not imported. Raise `ServeError` if it is not installed."""
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    folder = next((Path(place) for place in places or () if Path(place).is_dir()), None)
    if folder is None:
        raise ServeError(f"the package {name} is not installed: install tidewheel again")
    return folder.resolve()


def python_path() -> list[str]:
    """Return the PYTHONPATH of a stub that imports what this Python imports."""
    roots = [package_folder(name).parent for name in _PACKAGES]
    site = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]
    return list(dict.fromkeys(str(path) for path in (*roots, *site)))
