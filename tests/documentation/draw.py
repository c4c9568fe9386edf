"""Draw docstrings and paragraphs at random for a reader who does not know the project.

    python tests/documentation/draw.py --seed 1 --docstrings 30 --paragraphs 16

The reader sees no code. Each text should state its noun, unit and errors, and be understood at first read.
"""

from __future__ import annotations

import argparse
import ast
import functools
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CODE = ("backend", "kernels", "client", "queue", "process")
PAGES = "docs"
LEAST_WORDS = 6  # of a paragraph
_NOT_PROSE = ("#", "|", "```", "<!--", "![", "---")


class Passage(NamedTuple):
    file: Path
    line: int  # from 1
    title: str  # the definition, or the heading above
    text: str


@functools.cache
def docstrings(path: Path) -> list[Passage]:
    """Return the docstrings of a Python file."""
    return [
        Passage(path, node.body[0].lineno, _title(node), text)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]


def paragraphs(path: Path) -> Iterator[Passage]:
    """Yield the paragraphs of a Markdown page: prose and lists; no headings, tables, code and pictures."""
    heading, block, start, in_code = "", [], 0, False
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        is_code = in_code or line.lstrip().startswith("```")
        if line.lstrip().startswith("```"):
            in_code = not in_code
        if line.startswith("#") and not is_code:
            heading = line.lstrip("# ")
        if line.strip() and not is_code and not line.lstrip().startswith(_NOT_PROSE):
            if block and re.match(r"\s*([-*]|\d+\.) ", line):  # each item of a list is a paragraph
                yield Passage(path, start, heading, "\n".join(block))
                block = []
            start = start if block else number
            block.append(line)
        elif block:
            yield Passage(path, start, heading, "\n".join(block))
            block = []


def draw(passages: Sequence[Passage], count: int, seed: int) -> list[Passage]:
    """Return `count` passages, the same for the same seed and files."""
    return random.Random(seed).sample(passages, min(count, len(passages)))


def show(passage: Passage) -> str:
    return f"{passage.file.relative_to(ROOT)}:{passage.line}  {passage.title}\n\n{passage.text}\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docstrings", type=int, default=30, help="how many docstrings")
    parser.add_argument("--paragraphs", type=int, default=16, help="how many paragraphs of docs/")
    args = parser.parse_args(argv)
    code = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
    pages = sorted((ROOT / PAGES).rglob("*.md"))
    drawn = draw([one for path in code for one in docstrings(path)], args.docstrings, args.seed)
    prose = [one for path in pages for one in paragraphs(path) if len(one.text.split()) >= LEAST_WORDS]
    drawn += draw(prose, args.paragraphs, args.seed)
    for number, passage in enumerate(drawn, 1):
        print(f"--- {number}. {show(passage)}")
    return 0


def _title(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return "module" if isinstance(node, ast.Module) else node.name


if __name__ == "__main__":
    sys.exit(main())
