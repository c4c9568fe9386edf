"""A module's base name says one thing in the whole code, and a function fits on a screen."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("backend", "kernels", "client", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MAX_LINES = 60  # of a function, its signature and docstring included
EACH_OPERATION = "the same part of each operation of the kernels"

# Base names that several modules may have, with the reason.
SHARED_NAMES = {
    "cpu": EACH_OPERATION,
    "reference": EACH_OPERATION,
    "triton_kernels": EACH_OPERATION,
    "cluster": "the benchmark of a command has the command's name",
    "results": "the module of a command has the command's name",
}


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield qualified name and number of lines of every function, methods and inner ones included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, (node.end_lineno or 0) - node.lineno + 1
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, prefix)


def long_functions(source: str) -> list[str]:
    return [name for name, num_lines in functions(ast.parse(source)) if num_lines > MAX_LINES]


def test_a_base_name_occurs_once() -> None:
    stems = Counter(path.stem for path in FILES if not path.stem.startswith("__"))
    shared = {stem for stem, count in stems.items() if count > 1}
    assert shared - SHARED_NAMES.keys() == set(), "rename one of each, or give the reason"
    assert SHARED_NAMES.keys() - shared == set(), "occur once: delete these entries"


def test_functions_are_short() -> None:
    found = {name for path in FILES for name in long_functions(path.read_text())}
    assert found == set(), f"more than {MAX_LINES} lines"


def test_long_functions_are_found() -> None:
    body = "\n".join(f"        x{line} = {line}" for line in range(MAX_LINES))
    assert long_functions(f"class A:\n    def long(self):\n{body}\n    def short(self):\n        pass\n") == [
        "A.long"
    ]
