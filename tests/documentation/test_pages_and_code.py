"""What the front page and docs/ point to is there, and what they count is so."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from layers.test_layers import LAYERS

ROOT = Path(__file__).parents[2]
FOLDERS = ("backend", "kernels", "client", "process", "queue", "tests", "benchmarks", "demo_model")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCES = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
README_LINES = 150


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> Iterator[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    return (target for target in targets if not target.startswith(("http://", "https://")))


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")))
    assert not {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in SOURCES)}


def test_every_page_is_linked_from_another() -> None:
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)}
    assert not [page.name for page in PAGES if page.resolve() not in linked and page.name != "README.md"]


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


@pytest.mark.parametrize("title", ["The way in", "One token back"])
def test_the_walk_has_as_many_files_as_it_says(title: str) -> None:
    found = re.search(rf"^## {title}: (\d+) files\n(.*?)^## ", ARCHITECTURE, re.DOTALL | re.MULTILINE)
    assert found is not None
    steps = re.findall(r"^\| (\d+) \| \[`[\w/.]+`\]\((\S+)\)", found[2], re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, int(found[1]) + 1))
    assert len({path for _, path in steps}) == len(steps)


def test_make_runs_every_test_once() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    dry_run = subprocess.run(
        ["make", "--dry-run", "test"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    parts = [shlex.split(line) for line in dry_run.stdout.splitlines() if "pytest -q -m " in line]
    assert len(parts) > 8
    for path in (ROOT / "tests").rglob("test_*.py"):
        is_e2e = re.search(r"pytest\.mark\.e2e", path.read_text(encoding="utf-8")) is not None
        marks = "e2e and" if is_e2e else "not"
        runs = [words for words in parts if words[words.index("-m") + 1].startswith(marks) and is_given(path, words)]
        assert len(runs) == (path.parent.name != "clients"), path  # which make test-clients runs


def is_given(path: Path, command: Sequence[str]) -> bool:
    """Return whether a command of pytest names the file or a folder of it, and does not ignore them."""
    places = {str(place.relative_to(ROOT)) for place in (path, *path.parents) if place.is_relative_to(ROOT)}
    named = {word: before != "--ignore" for before, word in itertools.pairwise(command) if word in places}
    return bool(named) and all(named.values())


def test_the_layers_are_those_of_the_layer_test() -> None:
    rows = re.findall(r"^\| L(\d) \| ([^|]+) \|", ARCHITECTURE, re.MULTILINE)
    assert {name: int(level) for level, names in rows for name in re.findall(r"`([\w.]+)`", names)} == LAYERS


@pytest.mark.parametrize(("page", "least"), [("SECURITY.md", 20), ("docs/evidence/faults.md", 60)])
def test_the_tests_that_a_page_names_are_there(page: str, least: int) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / page).read_text(encoding="utf-8"))
    assert len(named) > least
    assert not [test for path, test in named if f"def {test}(" not in (ROOT / "tests" / path).read_text()]


def test_every_rule_of_security_has_a_test() -> None:
    rows = re.findall(r"^\| (C\d+) \|.*\|([^|]*)\|$", (ROOT / "SECURITY.md").read_text("utf-8"), re.MULTILINE)
    assert [name for name, _ in rows] == [f"C{number}" for number in range(1, len(rows) + 1)]
    assert [name for name, tests in rows if "::" not in tests] == []


def test_dependencies_have_bounds_and_reasons() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    texts = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    required = [Requirement(text) for text in texts]
    assert [str(one) for one in required if "<" not in str(one.specifier)] == []
    reasons = (ROOT / "docs" / "install.md").read_text("utf-8").partition("## Dependencies")[2]
    cells = " ".join(re.findall(r"^\| ([^|]+) \|", reasons, re.MULTILINE)).replace("_", "-")
    assert {one.name.replace("_", "-") for one in required} - set(re.findall(r"[\w-]+", cells)) == set()


def test_every_case_of_the_faults_has_a_test() -> None:
    page = (ROOT / "docs/evidence/faults.md").read_text("utf-8")
    numbers = re.findall(r"^\| ([FM]\d+) \|", page, re.MULTILINE)
    gaps = {f"F{number}" for number in (10, 16, 24, 34, 38, 42)}
    cases = {f"F{number}" for number in range(1, 49)} - gaps | {f"M{number}" for number in range(1, 10)}
    assert set(numbers) == cases
