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
OPERATION = "an operation, and its triton-lang kernel"
COMMAND = "what a command runs, and the command"
TWO_THINGS = "two things: to be renamed"

# Base names that several modules have, with the reason. An entry goes with the last rename.
SHARED_NAMES = {
    "activation": OPERATION,
    "attention": OPERATION,
    "kv_cache": OPERATION,
    "logprobs": OPERATION,
    "penalties": OPERATION,
    "rms_norm": OPERATION,
    "rope": OPERATION,
    "sampling": OPERATION,
    "chat": COMMAND,
    "serve": COMMAND,
    "config": "the engine's settings; those of the scheduler and of a checkpoint",
    "errors": "the errors of a program: engine, server, benchmark, client",
    "settings": "reading settings: as such, and from Triton's configuration",
    "stats": "figures of the engine; those of the front end and of a benchmark",
    "base": TWO_THINGS,
    "client": TWO_THINGS,
    "control": TWO_THINGS,
    "events": TWO_THINGS,
    "fairness": TWO_THINGS,
    "live": TWO_THINGS,
    "options": TWO_THINGS,
    "plan": TWO_THINGS,
    "plots": TWO_THINGS,
    "report": TWO_THINGS,
    "sampling_candidates": TWO_THINGS,
    "trace_files": TWO_THINGS,
    "values": TWO_THINGS,
    "work": TWO_THINGS,
    "worker": TWO_THINGS,
}
# Functions of more than MAX_LINES, with the reason. An entry goes with its function.
LONG_FUNCTIONS = {
    "prefill_attention_kernel": "a kernel cannot call what shares its registers",
    "decode_attention_kernel": "a kernel cannot call what shares its registers",
    "rope_and_cache_kernel": "a kernel cannot call what shares its registers",
    "attend_tiles": "a kernel cannot call what shares its registers",
    "Request.__init__": "to be shortened",
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
    assert SHARED_NAMES.keys() - shared == set(), "occur once now: delete these entries"


def test_functions_are_short() -> None:
    found = {name for path in FILES for name in long_functions(path.read_text())}
    assert found - LONG_FUNCTIONS.keys() == set(), f"more than {MAX_LINES} lines"
    assert LONG_FUNCTIONS.keys() - found == set(), "short now: delete these entries"


def test_long_functions_are_found() -> None:
    body = "\n".join(f"        x{line} = {line}" for line in range(MAX_LINES))
    assert long_functions(f"class A:\n    def long(self):\n{body}\n    def short(self):\n        pass\n") == [
        "A.long"
    ]
