"""Would this suite notice? Defects of our own code, planted in a running server, must each fail a case of it.

The case passes on the same server right before, while the defect does not act.
"""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from faults import (
    test_deadlines,
    test_disconnects,
    test_engine_faults,
    test_memory,
    test_neighbours,
    test_overload,
    test_processes,
)
from support.faults import defects, nothing_lost
from support.faults.nothing_lost import NO_ANSWER, record
from support.faults.planted import Fault
from support.faults.service import serving
from support.triton import burst
from support.triton.serving import ROOT

pytestmark = pytest.mark.e2e

# Seconds that a case waits in vain.
SETTLE_S = 8.0
TOLD_S = 15.0
ANSWER_LIMIT_S = 20.0


class Find(NamedTuple):
    case: Callable[..., None]
    check: str  # that fails
    spoils: bool = False  # the server is not as before


HANG = test_engine_faults.test_a_step_that_hangs_is_ended_with_its_stacks
CANCELS = test_disconnects.test_cancelled_grpc_streams
ENDS = test_disconnects.test_streams_cancelled_as_they_end
REFUSALS = test_memory.test_what_never_fits_is_refused_at_once
DEATH = test_engine_faults.test_a_step_that_raises_ends_all_and_the_next_engine_serves

FINDS = {
    "leaked_block": Find(ENDS, "blocks"),
    "double_free": Find(ENDS, "survivors", spoils=True),
    "bias_of_a_neighbour": Find(test_neighbours.test_options_of_a_request_change_no_other, "case"),
    "stale_heartbeat": Find(HANG, "service", spoils=True),
    "lost_final": Find(REFUSALS, "clock", spoils=True),
    "dropped_cancel": Find(CANCELS, "blocks", spoils=True),
    "untold_client": Find(DEATH, "clock", spoils=True),
    "lost_token": Find(REFUSALS, "survivors"),
    "leaked_descriptor": Find(CANCELS, "host"),
    "leaked_thread": Find(test_overload.test_a_full_waiting_set_refuses_the_rest, "host"),
    "counted_twice": Find(CANCELS, "ledger", spoils=True),
    "unbounded_buffer": Find(test_memory.test_many_requests_leave_no_memory, "host", spoils=True),
    "orphaned_process": Find(test_processes.test_killed_prompt_processes_are_replaced, "host", spoils=True),
    "ignored_deadline": Find(test_deadlines.test_a_deadline_in_the_middle_ends_with_what_there_is, "case"),
    "untagged_error": Find(REFUSALS, "case"),
    "logged_stack": Find(REFUSALS, "log"),
    "stale_readiness": Find(DEATH, "service"),
    "left_shared_memory": Find(test_processes.test_a_dead_front_end_is_told_and_started_again, "case", spoils=True),
}


class Workshop:
    """A server with defects that do not act. One that is spoilt is replaced."""

    def __init__(self, folder: Path, servers: ExitStack) -> None:
        self._folder = folder
        self._servers = servers
        self._switch = folder / "switch"
        self._fixtures: dict[str, Any] = {}

    def run(self, case: Callable[..., None], defect: str = "") -> None:
        """Run a case of the suite while the defect acts."""
        fixtures = self._fixtures or self._start()
        parameters = inspect.signature(case).parameters.values()
        arguments = [fixtures[str(parameter.annotation)] for parameter in parameters]
        self._switch.write_text(defect)
        try:
            case(*(make() for make in arguments))
        finally:
            self._switch.write_text("")

    def throw_away(self) -> None:
        self._fixtures = {}
        self._servers.close()

    def _start(self) -> dict[str, Callable[[], Any]]:
        """Return what cases take, by type."""
        self._switch.write_text("")
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        server = self._servers.enter_context(serving(folder, variables=defects.variables(self._switch)))
        recorded = record(server)
        self._fixtures = {
            "Server": lambda: server,
            "Recorded": lambda: recorded,
            "Case": lambda: partial(nothing_lost.nothing_lost, server, recorded),
            "psutil.Process": lambda: test_engine_faults.mortal_engine(server),
            "signal.Signals": lambda: signal.SIGKILL,
            "Fault": lambda: Fault.RAISES,
        }
        return self._fixtures


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with ExitStack() as servers:
        yield Workshop(tmp_path_factory.mktemp("workshop"), servers)


def test_every_defect_has_a_case_and_is_documented() -> None:
    assert FINDS.keys() == defects.DEFECTS.keys()
    page = (ROOT / "docs/evidence/faults.md").read_text()
    assert [name for name, find in FINDS.items() if f"| `{name}` | {find.check} |" not in page] == []


def test_every_defect_has_its_place() -> None:
    code = (
        "import functools, importlib, sys\nfrom unittest import mock\n"
        "sys.modules['triton_python_backend_utils'] = mock.MagicMock()\nfrom support.faults import defects\n"
        "for module, place in defects.places():\n"
        "    functools.reduce(getattr, place.split('.'), importlib.import_module(module))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", FINDS)
def test_found(workshop: Workshop, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = FINDS[name]
    with ExitStack() as unless_kept:
        unless_kept.callback(workshop.throw_away)
        workshop.run(find.case)
        monkeypatch.setattr(nothing_lost, "SETTLE_S", SETTLE_S)
        monkeypatch.setattr(nothing_lost, "TOLD_S", TOLD_S)
        monkeypatch.setattr(burst, "ANSWER_LIMIT_S", ANSWER_LIMIT_S)
        with pytest.raises((AssertionError, *NO_ANSWER)) as failure:
            workshop.run(find.case, name)
        assert failed_check(failure.value) == find.check, str(failure.getrepr(style="short"))
        if not find.spoils:
            unless_kept.pop_all()


def failed_check(error: BaseException) -> str:
    """Return the name that `check` noted, or "case" for what is beyond it."""
    notes: list[str] = getattr(error, "__notes__", [])
    return notes[0].removeprefix("check: ") if notes else "case"
