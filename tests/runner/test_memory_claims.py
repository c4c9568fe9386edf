"""Engines that start leave each other memory that Linux still calls free."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from tidewheel.runner import host_memory
from tidewheel.runner.host_memory import ClaimRecord, MemoryClaim, SpareMemory, spare_memory
from tidewheel.settings import GIB

MINE = ClaimRecord(1, base=0, takes_share=True, began=100)
CODE = """
import sys
from tidewheel.runner.host_memory import MemoryClaim
claim = MemoryClaim(takes_share=True, others=0)
claim.take(3 << 30)
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def resident(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes that each process has, of those that these tests name."""
    real, known = host_memory.resident_bytes, dict[int, int]()
    monkeypatch.setattr(host_memory, "resident_bytes", lambda pid: known.get(pid, real(pid) if pid > 99 else 0))
    return known


def spare(*others: ClaimRecord, mine: ClaimRecord = MINE, available: int = 1000) -> SpareMemory:
    claims: dict[int, list[ClaimRecord]] = {mine.pid: [mine]}
    for claim in others:
        claims.setdefault(claim.pid, []).append(claim)
    return spare_memory(mine, claims, available)


def test_one_engine_may_use_all_but_what_it_still_takes_itself(resident: dict[int, int]) -> None:
    assert spare() == (1000, 1)
    mine = ClaimRecord(1, base=50, others=300, takes_share=True)
    resident[1] = 250  # of 350, when it has its weights
    assert spare(mine=mine) == (900, 1)


def test_engines_that_load_at_once_get_the_same_whichever_is_first(resident: dict[int, int]) -> None:
    loading = ClaimRecord(2, base=0, others=100, takes_share=True, began=90)
    assert spare(loading) == (450, 2)
    sized = ClaimRecord(2, base=0, others=100, cache=225, takes_share=True, began=90, sized=110)
    assert spare(sized) == (450, 2)
    resident[2] = 100
    assert spare(sized) == (500, 2)


def test_a_cache_of_an_engine_from_before_counts_as_far_as_it_is_not_filled(resident: dict[int, int]) -> None:
    before = ClaimRecord(2, base=10, others=100, cache=400, takes_share=True, began=5, sized=20)
    assert spare(before) == (1000 - 510, 1)
    resident[2] = 310
    assert spare(before) == (1000 - 200, 1)
    resident[2] = 700
    assert spare(before) == (1000, 1)


def test_a_cache_whose_size_is_set_is_left_to_its_engine_and_shares_nothing() -> None:
    explicit = ClaimRecord(2, base=0, others=100, cache=300, began=150, sized=160)
    assert spare(explicit) == (600, 1)


def test_two_engines_of_one_process_count_once(resident: dict[int, int]) -> None:
    resident[1] = 500
    first = ClaimRecord(1, base=100, others=200, cache=400, takes_share=True, began=5, sized=20)
    assert spare(first, mine=ClaimRecord(1, base=500, others=100, takes_share=True, began=100)) == (700, 1)


def test_claims_of_others_leave_a_part_of_what_is_free() -> None:
    """They may never be used; only this engine's own weights must have room."""
    others = ClaimRecord(2, base=0, cache=5000, sized=50)
    assert spare(others) == (250, 1)
    assert spare(others, mine=ClaimRecord(1, base=0, others=200, takes_share=True, began=100)) == (200, 1)


def test_a_cache_with_a_size_is_compared_with_what_is_free_now() -> None:
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"claimed\n"
        spare = MemoryClaim(takes_share=False, others=0).spare(GIB, 0)
        other.communicate()
    assert spare.bytes > 0  # the other process has claimed 3 GiB


def test_a_process_sees_the_claims_of_others_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # engines of earlier tests in this process, which would go meanwhile
    read, known = host_memory._read_record, {str(os.getpid())}  # engines of other tests come and go
    monkeypatch.setattr(
        host_memory, "_read_record", lambda link, *kind: read(link, *kind) if link.parts[2] in known else None
    )
    mine = MemoryClaim(takes_share=True, others=0)
    alone = mine.spare(100 * GIB, 0)
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"claimed\n"
        known.add(str(other.pid))
        beside = mine.spare(100 * GIB, 0)
        later = MemoryClaim(takes_share=True, others=0)
        assert later.spare(100 * GIB, 0).bytes <= (100 - 2) * GIB  # it loads beside `mine`, and after the other one
        other.communicate()
    assert beside.num_engines == alone.num_engines + 1
    del later
    gc.collect()
    assert mine.spare(100 * GIB, 0).num_engines == alone.num_engines


def test_ranks_share_what_is_free_for_caches_of_a_fixed_size() -> None:
    spare = MemoryClaim(takes_share=False, others=0, num_ranks=4).spare(4 * GIB, 0)
    assert spare == (GIB, 1)


def test_without_memfds_an_engine_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    claim = MemoryClaim(takes_share=True, others=0)
    claim.take(GIB)
    assert claim.spare(GIB, 0).bytes > 0
