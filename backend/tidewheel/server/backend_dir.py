"""The `--backend-directory`: Triton's Python backend with the right stub, and Tidewheel."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

from tidewheel.server.errors import ServeError
from tidewheel.server.locate import STUB_NAME, TritonInstall

BACKEND = "tidewheel"
_PACKAGES = ("tidewheel", "tidewheel_kernels")


def assemble(install: TritonInstall, target: Path) -> Path:
    """Make `target` and return it. It has links to the installed backends, all of them for ensembles, and a copy of
    the Python backend's library.
    """
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
    """Return the folder of a package without importing it. Raise `ServeError` if it is not installed."""
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    folder = next((Path(place) for place in places or () if Path(place).is_dir()), None)
    if folder is None:
        raise ServeError(f"the package {name} is not installed: install tidewheel again")
    return folder.resolve()


def python_path() -> list[str]:
    """Return the PYTHONPATH with which the stub imports what this Python imports, most specific first."""
    roots = [package_folder(name).parent for name in _PACKAGES]
    site = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]
    return list(dict.fromkeys(str(path) for path in (*roots, *site)))
