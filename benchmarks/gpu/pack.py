"""Prepare a folder for a GPU machine without a network, and print the line to run there.

    python -m gpu.pack build/gpu_machine

It holds the source without results, the packages of wheels.txt unpacked, and compiled kernels of an earlier
run if they are given. The machine needs what machine.txt lists; nothing is installed there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from gpu import kernel_archive
from tidewheel.bench.environment import commit

ROOT = Path(__file__).parents[2]
WHEELS = Path(__file__).with_name("wheels.txt")
MAX_BYTES = 40 << 20
LEFT_OUT = ":!benchmarks/results"
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")
SCRIPT = """#!/bin/bash
# bash run.sh OUT [options of `python3 -m gpu`]: results go to the folder OUT.
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
case ${{1:--}} in -*) echo "bash run.sh OUT [options]: OUT is missing, a folder for the results" >&2; exit 2 ;; esac
out=$1
shift
tree=$here/source
export PYTHONPATH=$tree/benchmarks:$tree/backend:$tree/kernels:$tree/client:$tree/process:$tree/queue:$here/site
export PYTHONDONTWRITEBYTECODE=1
kernels=()
[ -f "$here/{archive}" ] && kernels=(--kernels "$here/{archive}")
exec "${{PYTHON:-python3}}" -P -m gpu --out "$out" --commit {commit} "${{kernels[@]}}" "$@"
"""


def pack(folder: Path, python: str, kernels: Path | None) -> int:
    """Return the bytes of the folder; raise SystemExit if it is too large for a machine that takes little."""
    shutil.rmtree(folder, ignore_errors=True)
    copy_source(folder / "source")
    fetch_packages(folder / "site", python)
    if kernels is not None:
        shutil.copy(kernels, folder / kernel_archive.NAME)
    (folder / "run.sh").write_text(SCRIPT.format(commit=commit(), archive=kernel_archive.NAME), encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        raise SystemExit(f"{folder} has {size >> 20} MiB and may have {MAX_BYTES >> 20}: leave out --kernels")
    return size


def copy_source(target: Path) -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-zco", "--exclude-standard", "--", ".", LEFT_OUT],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def fetch_packages(target: Path, python: str) -> None:
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--no-compile",
        "--python-version", python, *platforms, "--target", str(target), "-r", str(WHEELS),
    ]  # fmt: skip
    subprocess.run(command, check=True)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    made.add_argument("--python", default="3.12", help="version of the machine's Python (default: %(default)s)")
    made.add_argument("--kernels", type=Path, help=f"{kernel_archive.NAME} of an earlier run")
    options = made.parse_args()
    size = pack(options.folder, options.python, options.kernels)
    print(f"{options.folder}: {size / 2**20:.1f} MiB. On the machine:\n\n    bash {options.folder}/run.sh results\n")


if __name__ == "__main__":
    main()
