"""Who may be in a group of processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tidewheel.errors import ConfigError
from tidewheel.runner import collectives
from tidewheel.runner.collectives import ProcessCollectives

LISTENS = "0A"
Change = Callable[[list[str]], None]


class Connections:
    """The kernel's table, in which sockets that connected to a listening one are changed."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def read_text(self, **options: str) -> str:
        rows = [line.split() for line in Path("/proc/self/net/tcp").read_text(**options).splitlines()]
        listening = {row[1] for row in rows if row[3] == LISTENS}
        for row in rows:
            if row[2] in listening:
                self._change(row)
        return "\n".join(map(" ".join, rows))


def unchanged(_row: list[str]) -> None:
    pass


def of_another_user(row: list[str]) -> None:
    row[7] = str(os.getuid() + 1)


def in_another_table(row: list[str]) -> None:
    """A socket of IPv6, say."""
    row[1] = row[2] = "-"


@pytest.mark.parametrize(
    ("change", "is_refused"), [(unchanged, False), (of_another_user, True), (in_another_table, True)]
)
def test_a_group_refuses_the_process_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, is_refused: bool
) -> None:
    monkeypatch.setattr(collectives, "CONNECTIONS", Connections(change))
    results: list[object] = []

    def join(rank: int) -> None:
        try:
            results.append(ProcessCollectives(tmp_path / "rendezvous", rank, 2, torch.device("cpu"), 20.0))
        except ConfigError as error:
            results.append(str(error))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(join, range(2)))
    refusals = [each for each in results if isinstance(each, str)]
    assert bool(refusals) == is_refused
    assert all("a process of another user took the place of a rank" in each for each in refusals)


def test_a_group_is_refused_where_the_kernel_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "CONNECTIONS", tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read"):
        collectives.check_peers(set())
