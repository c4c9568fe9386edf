"""Compiled kernels of a run, for the next one on a machine of the same kind.

triton-lang finds a kernel by a group file that names its files by absolute paths. An archive holds machine code and
descriptions, without the stages of compilation, and groups are written anew for the folder where it is unpacked.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

NAME = "kernels.tar.gz"
MAX_BYTES = 15 << 20
KEPT = ("*.cubin", "*.json", "*.so")
GROUP = "__grp__*.json"


def pack(cache: Path, out: Path) -> int:
    """Write the archive, or what of it fits; return the number of kernels in it. Write none for an empty cache."""
    folders = sorted(folder for folder in cache.glob("*") if folder.is_dir()) if cache.is_dir() else []
    count = 0
    if not folders:
        return count
    with (out / NAME).open("wb") as written, tarfile.open(fileobj=written, mode="w:gz", compresslevel=6) as archive:
        for folder in folders:
            if written.tell() > MAX_BYTES:
                break
            files = sorted({path for pattern in KEPT for path in folder.glob(pattern)})
            for path in files:
                archive.add(path, arcname=f"{folder.name}/{path.name}")
            count += any(path.suffix == ".cubin" for path in files)
    return count


def unpack(archive: Path, cache: Path) -> int:
    """Return the number of kernels."""
    cache.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as members:
        members.extractall(cache, filter="data")
    for path in cache.glob(f"*/{GROUP}"):
        group = json.loads(path.read_text(encoding="utf-8"))
        paths = {name: str(path.parent / name) for name in group["child_paths"] if (path.parent / name).exists()}
        path.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")
    return len(list(cache.glob("*/*.cubin")))
