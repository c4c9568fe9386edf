"""Print words of docstrings and comments in Python files, whose names come on standard input, and of docs/."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]


def words_of_prose(source: str) -> int:
    """Return the words of a file's docstrings and comments."""
    nodes = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    texts = [ast.get_docstring(node) or "" for node in nodes]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return sum(len(text.split()) for text in texts)


def main() -> None:
    files = sys.stdin.read().split()
    prose = sum(words_of_prose((ROOT / name).read_text(encoding="utf-8")) for name in files)
    print(f"{'prose':<10} {prose:6d} words of docstrings and comments")
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").rglob("*.md"))
    print(f"{'docs':<10} {words:6d} words")


if __name__ == "__main__":
    main()
