"""One generator over the demo model in float32; Triton's module is a plain one, as for the adapter's tests."""

from __future__ import annotations

import sys

import pytest

from support.triton import fake_triton
from support.triton.serving import WEIGHTS
from tidewheel.bench.batch_generator import Generator
from tidewheel.config import EngineConfig

sys.modules["triton_python_backend_utils"] = fake_triton


@pytest.fixture(scope="session")
def generator() -> Generator:
    return Generator.load(EngineConfig(model=str(WEIGHTS), dtype="float32", device="cpu"))
