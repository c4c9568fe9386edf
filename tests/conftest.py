from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("support")  # failures there show values, too

# Programs under test can be interrupted where a script runs the tests in the background, which ignores Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # on a machine with a GPU, whose tests need none
    pass
else:
    from support.long_runs import examples

    # No example fails because the machine is busy.
    settings.register_profile(
        "tidewheel", max_examples=examples(40, 100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("tidewheel")


@pytest.fixture(autouse=True, scope="session")
def _commands_leave_this_process_its_core_dumps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidewheel.cli.main.forbid_core_dumps", lambda: None)
        yield


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a folder with room for the name of a socket."""
    path = Path(tempfile.mkdtemp(prefix="tw-"))
    yield path
    shutil.rmtree(path)
