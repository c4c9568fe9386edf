"""Fewer cases where triton-lang interprets kernels, which takes seconds: a GPU and `make test-long` run all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from support.long_runs import examples, slow

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") != "1"


def fewer(interpreted: int, compiled: int) -> int:
    """Return the number of examples in this run."""
    return compiled if ON_GPU else examples(interpreted, compiled)


def slow_interpreted(values: Iterable[Any]) -> list[Any]:
    """Leave values of a parameter to `make test-long`, unless kernels are compiled."""
    return list(values) if ON_GPU else slow(values)
