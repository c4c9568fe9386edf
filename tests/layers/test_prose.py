"""Docstrings and comments are plain: they begin with what the thing is or does, and name who acts."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("backend", "kernels", "client", "process", "queue")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
FRAGMENTS = re.compile(r"(Of|As|By|What|Whether|Who|Whoever|Whose|Unlike|Unless|For|Those|Nobody|Why|How)\b")
RIDDLES = re.compile(r"\b(whoever|nobody|anybody|everybody|of ours|none of our)\b", re.IGNORECASE)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def complaints(source: str) -> list[tuple[int, str]]:
    tree = ast.parse(source)
    found = [(line, text) for line, text in docstrings(tree) if FRAGMENTS.match(text)]
    prose = (*docstrings(tree), *comments(source))
    return found + [(line, text) for line, text in prose if RIDDLES.search(text)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_plain(path: Path) -> None:
    assert complaints(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    ['def f():\n    """Of a row."""', '"""Whether it is."""', "x = 1  # nobody waits", 'class A:\n    """As B."""'],
)
def test_riddles_and_fragments_are_found(source: str) -> None:
    assert complaints(source)


def test_plain_prose_passes() -> None:
    assert complaints('"""Keep blocks."""\n\n\ndef f():\n    """Return the rows."""  # why: a reason\n') == []
