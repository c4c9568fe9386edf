"""KVCacheManager against the naive model of `support.kvcache.kv_machine`."""

from __future__ import annotations

import pytest
from hypothesis import settings

from support.kvcache.kv_machine import KVMachine

TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.slow
class TestKVMachineLong(KVMachine.TestCase):
    settings = settings(max_examples=10_000, stateful_step_count=60, deadline=None)
