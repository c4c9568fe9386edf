"""Result of a migration, and how it is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tidewheel.entries.finding import Finding
from tidewheel.errors import ConfigError


class NewEntry(NamedTuple):
    name: str
    files: dict[str, str]  # text by path in the entry's folder
    source: Path | None = None  # folder whose other files belong to the entry
    left_out: tuple[str, ...] = ()  # names of files that do not


class Migration(NamedTuple):
    entries: list[NewEntry]
    lost: list[Finding]  # what could not be kept, where it stood
    unknown: list[Finding]  # settings that stay, and stop the load: a name may be misspelt


def write(entries: Iterable[NewEntry], repository: Path) -> list[Path]:
    """Write entries as folders that must not exist yet. Raise `ConfigError` before anything is written."""
    entries = list(entries)
    for entry in entries:
        if (repository / entry.name).exists():
            raise ConfigError(f"{repository / entry.name} exists, and is not written over: give another --out")
    for entry in entries:
        folder = repository / entry.name
        if entry.source is not None:
            shutil.copytree(entry.source, folder, symlinks=True, ignore=shutil.ignore_patterns(*entry.left_out))
        (folder / "1").mkdir(parents=True, exist_ok=True)
        _write_files(entry, folder)
    return [repository / entry.name for entry in entries]


def write_in_place(entries: Iterable[NewEntry]) -> list[Path]:
    """Write over the files that entries come from. Raise `ConfigError` for an entry that replaces several."""
    entries = list(entries)
    for entry in entries:
        if entry.source is None:
            raise ConfigError(f"--in-place: {entry.name} is made of several entries, which stay: give --out")
    for entry in entries:
        if entry.source is not None:
            _write_files(entry, entry.source)
    return [entry.source for entry in entries if entry.source is not None]


def _write_files(entry: NewEntry, folder: Path) -> None:
    for name, text in entry.files.items():
        (folder / name).write_text(text, encoding="utf-8")
