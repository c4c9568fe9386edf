"""The adapter runs inside Triton's stub process; here a plain module stands for what that provides."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from support.one_shot.shared_memory import shared_folder
from support.triton import fake_triton

__all__ = ["fresh_server", "shared_folder"]

sys.modules["triton_python_backend_utils"] = fake_triton


@pytest.fixture(autouse=True)
def fresh_server() -> Iterator[None]:
    """No metric and no log line of an earlier test."""
    fake_triton.MetricFamily.values.clear()
    fake_triton.MetricFamily.num_calls = 0
    fake_triton.Logger.lines.clear()
    yield
