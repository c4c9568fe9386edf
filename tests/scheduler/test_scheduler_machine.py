"""Whatever happens in whatever order: every request ends once, with the tokens that it would get alone."""

from __future__ import annotations

import pytest
from hypothesis import settings

from support.scheduler.scheduler_machine import SchedulerMachine

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=50, deadline=None, derandomize=True)


@pytest.mark.slow
class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings(max_examples=10_000, stateful_step_count=100, deadline=None)
