"""More examples and cases in `make test-long` than in `make test`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

IS_LONG = bool(os.environ.get("TIDEWHEEL_LONG"))


def examples(usual: int, long: int) -> int:
    """Return the number of examples of a property in this run."""
    return long if IS_LONG else usual


def slow(values: Iterable[Any]) -> list[Any]:
    """Leave these values of a parameter to `make test-long`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
