"""Whatever happens in whatever order: requests with adapters end once, computed with theirs, in few enough slots."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings

from support.scheduler.lora_machine import LoraMachine

PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking a long life takes minutes

TestLoras = LoraMachine.TestCase
TestLoras.settings = settings(max_examples=40, stateful_step_count=50, deadline=None, derandomize=True, phases=PHASES)


@pytest.mark.slow
class TestLorasLong(LoraMachine.TestCase):
    settings = settings(max_examples=5_000, stateful_step_count=100, deadline=None)
