"""Plugin of pytest that prints a line as each test ends, so that a stopped file has counts. Runs bfloat16 first."""

from __future__ import annotations

import json
import os
import sys

import pytest

PREFIX = "@test "  # of a line of its own
FIRST = ("bf16", "bfloat16")
SHARD = "TIDEWHEEL_TEST_SHARD"  # "1/3": the second of three parts of the tests; "1/3 in order": of neighbours


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(name in item.name for name in FIRST))
    part, _, order = os.environ.get(SHARD, "0/1").partition(" ")
    index, count = map(int, part.split("/"))
    ends = [len(items) * i // count for i in (index, index + 1)]
    items[:] = items[slice(*ends)] if order else items[index::count]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    message = "" if report.outcome != "failed" else str(report.longrepr)[-400:]
    line = json.dumps({"test": report.nodeid, "outcome": report.outcome, "message": message})
    print(f"\n{PREFIX}{line}", file=sys.__stdout__, flush=True)
