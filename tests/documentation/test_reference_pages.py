"""docs/settings.md and docs/errors.md say what the code says."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from documentation.reference_pages import PARTS, main, read_settings, render
from tidewheel.adapter.repository_entry import TRITON_PARAMETERS
from tidewheel.config import EngineConfig, setting_names
from tidewheel.errors import TAGS, ConfigError, TidewheelError, cause_and_remedy
from tidewheel.frontend.settings import FrontendSettings

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}


def first_cells(page: str) -> set[str]:
    return set(re.findall(r"^\| `([\w-]+)` \|", PAGES[page], re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_generated_parts_are_those_of_the_code(page: str) -> None:
    assert render(PAGES[page]) == PAGES[page], "run `make docs`"


def test_every_part_is_used() -> None:
    used = [name for page in PAGES.values() for name in re.findall(r"<!-- generated: (.+?) -->", page)]
    assert sorted(used) == sorted(PARTS)


def test_every_setting_is_described() -> None:
    names = {*setting_names(), *(field.name for field in dataclasses.fields(FrontendSettings))}
    assert names <= first_cells("settings.md")
    assert all(f"`{name}`" in PAGES["settings.md"] for name in {*TRITON_PARAMETERS, "engine_of"})


def test_every_setting_has_a_heading_and_a_meaning() -> None:
    assert all(heading and all(map(all, rows)) for heading, rows in read_settings(EngineConfig).items())


def test_every_tag_is_described() -> None:
    assert {name for name in first_cells("errors.md") if name.startswith("TW-")} == TAGS


def test_a_setting_without_a_meaning_is_refused() -> None:
    @dataclass
    class Settings:
        size: int = 3  # of something
        silent: int = 4

    with pytest.raises(ConfigError, match=r"Settings\.silent has no meaning"):
        read_settings(Settings)


def test_an_error_without_a_remedy_is_refused() -> None:
    class Puzzling(TidewheelError):
        """It went wrong."""

    with pytest.raises(ConfigError, match="Puzzling has 1 paragraphs"):
        cause_and_remedy(Puzzling)


def test_only_pages_that_differ_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "errors.md"
    old.write_text("Before\n<!-- generated: errors -->\nold\n<!-- end -->\nAfter\n")
    (tmp_path / "other.md").write_text("Nothing generated\n")
    main([str(tmp_path)])
    assert capsys.readouterr().out == f"{old}\n"
    assert re.fullmatch(r"Before\n.*TW-BUSY.*\nAfter\n", old.read_text(), re.DOTALL)
    main([str(tmp_path)])
    assert capsys.readouterr().out == ""
