"""A rank is killed, stopped or short of memory at any point of a step or a load: clients are told, all come back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.faults.rank_faults import Order
from support.faults.ranked_engine import ORDERS, ranked_engine
from support.long_runs import slow

QUICK = [
    Order(0, "inside a collective", "stop"),
    Order(0, "results read", "stop"),
    Order(1, "before a collective", "memory"),
]


@pytest.mark.parametrize("orders", [QUICK, *slow([ORDERS])], ids=["some", "all"])
def test_a_rank_that_fails_ends_all_and_all_come_back(folder: Path, tmp_path: Path, orders: list[Order]) -> None:
    with ranked_engine(folder, tmp_path) as engine:
        for order in random.Random(1).sample(orders, len(orders)):
            engine.check(order)
