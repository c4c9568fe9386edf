"""Python without the packages that the machine of the GPU recipe lacks, for a folder on PYTHONPATH.

`BARE_MACHINE` names files of distributions, one a line. Only they, what they require, and our own can be imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from importlib import machinery, metadata
from pathlib import Path
from typing import Any

NAME = re.compile(r"[\w.-]+")


def listed(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if name := NAME.match(line):
            yield normalised(name[0])


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def with_requirements(names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += required_by(name)
    return found


def required_by(name: str) -> list[str]:
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    return [normalised(NAME.match(text)[0]) for text in requirements if "extra ==" not in text]  # type: ignore[index]


def block(present: set[str]) -> None:
    """Let the path finder miss modules of absent distributions, as where they are not installed."""
    owners = {module: set(map(normalised, names)) for module, names in metadata.packages_distributions().items()}
    find = machinery.PathFinder.find_spec

    def find_spec(_: object, name: str, path: Any = None, target: Any = None) -> Any:
        owner = owners.get(name)
        return find(name, path, target) if owner is None or owner & present else None

    machinery.PathFinder.find_spec = classmethod(find_spec)  # type: ignore[method-assign, assignment]


if files := os.environ.get("BARE_MACHINE"):
    block({"tidewheel", *with_requirements(name for file in files.split(os.pathsep) for name in listed(Path(file)))})

if os.environ.get("PLANTED"):
    from planted_faults import plant

    plant()
