"""A function fits on a screen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("backend", "kernels", "client", "process", "queue", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MAX_LINES = 60  # of a function, its signature and docstring included


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


def test_functions_are_short() -> None:
    found = {name for path in FILES for name in long_functions(path.read_text())}
    assert found == set(), f"more than {MAX_LINES} lines"


def test_long_functions_are_found() -> None:
    body = "\n".join(f"        x{line} = {line}" for line in range(MAX_LINES))
    assert long_functions(f"class A:\n    def long(self):\n{body}\n    def short(self):\n        pass\n") == [
        "A.long"
    ]
