"""Programs that measure: `python benchmarks` lists them, `python benchmarks NAME [options]` runs one."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = ("engine", "path", "one_shot", "quantized", "routing", "cluster", "modelled", "common")


def programs() -> dict[str, Path]:
    """Map the name of each program to its file."""
    files = (file for folder in FOLDERS for file in sorted((HERE / folder).glob("*.py")))
    return {file.stem: file for file in files if '__name__ == "__main__"' in file.read_text(encoding="utf-8")}


def listing() -> str:
    """Return one line for each program: its name and the first sentence of its docstring."""
    lines = []
    for name, file in programs().items():
        documentation = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        lines.append(f"{file.parent.name:<9} {name:<19} {documentation.splitlines()[0]}")
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(listing())
        return
    name = sys.argv[1]
    file = programs().get(name)
    if file is None:
        sys.exit(f"benchmarks: no program {name!r}; `python benchmarks` lists them")
    del sys.argv[1]
    runpy.run_module(f"{file.parent.name}.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
