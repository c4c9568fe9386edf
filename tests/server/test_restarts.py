"""How often a server is started again."""

from __future__ import annotations

import pytest

from tidewheel.engine.launcher import RestartPolicy
from tidewheel.server import CrashLoop
from tidewheel.server.revival import Restarts


def test_delays_grow_and_a_crash_loop_ends() -> None:
    restarts = Restarts(RestartPolicy(first_delay_s=1, window_s=60, max_deaths=4))
    assert [restarts.next_delay_s(10, "") for _ in range(3)] == [1, 2, 4]
    with pytest.raises(CrashLoop, match=r"4 deaths within 60 s of service, .* the last: no memory"):
        restarts.next_delay_s(10, "no memory")


def test_old_deaths_are_forgotten_by_time_of_service() -> None:
    restarts = Restarts(RestartPolicy(first_delay_s=1, window_s=60, max_deaths=4))
    assert [restarts.next_delay_s(50, "") for _ in range(5)] == [1, 2, 2, 2, 2]
    restarts.next_delay_s(0, "a load of any length fails")
    with pytest.raises(CrashLoop):
        restarts.next_delay_s(0, "again")
