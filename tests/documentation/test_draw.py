"""Passages for a cold reader, and the counts of words."""

from __future__ import annotations

from pathlib import Path

import pytest

from documentation import draw
from documentation.count_words import words_of_prose

CODE = '''"""A module."""

class Block:
    """Tokens of a sequence."""

def free(block):
    return block  # for the next request
'''
PAGE = """# Title

Two lines
of prose.

| a | table |
|---|---|

```sh
a command
```

- one item
- another
"""


def test_docstrings_have_their_names_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "blocks.py"
    path.write_text(CODE)
    found = [(one.line, one.title, one.text) for one in draw.docstrings(path)]
    assert found == [(1, "module", "A module."), (4, "Block", "Tokens of a sequence.")]


def test_paragraphs_are_prose_and_items(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    found = [(one.line, one.title, one.text) for one in draw.paragraphs(path)]
    expected = [(3, "Two lines\nof prose."), (13, "- one item"), (14, "- another")]
    assert found == [(line, "Title", text) for line, text in expected]


def test_a_seed_draws_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(seed: str) -> str:
        assert draw.main(["--seed", seed, "--docstrings", "3", "--paragraphs", "2"]) == 0
        return capsys.readouterr().out

    assert drawn("1") == drawn("1") != drawn("2")
    assert drawn("1").count("\n--- ") == 4


def test_words_of_docstrings_and_comments() -> None:
    assert words_of_prose(CODE) == 2 + 4 + 4
