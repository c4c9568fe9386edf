"""A marathon of a minute and a half, so that the program for the long one works."""

from __future__ import annotations

import json

import pytest

from support.marathon.run import main
from support.triton.serving import ROOT

FAULTS = "engine paused,prompt process killed,connections reset,streams unread,bad requests"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_short_marathon_passes() -> None:
    status = main(["--minutes", "1.5", "--rate", "2", "--faults", FAULTS, "--name", "short_marathon"])
    found = json.loads((ROOT / "build" / "short_marathon" / "short_marathon.json").read_text())
    assert [one for one in found["verdicts"] if not one["passed"]] == []
    assert status == 0
    assert found["recovery_s"]
