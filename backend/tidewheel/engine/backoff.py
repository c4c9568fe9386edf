"""Engine deaths on disk, so that the next owner knows them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tidewheel.engine.run_dir import BACKOFF
from tidewheel.engine.status import replace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Restart delays, doubled per death. `max_deaths` within `window_s` are a crash loop."""

    first_delay_s: float = 0.25
    window_s: float = 60.0
    max_deaths: int = 5

    def delay_s(self, num_deaths: int) -> float:
        return 0.0 if num_deaths == 0 else self.first_delay_s * 2.0 ** (num_deaths - 1)


class Death(msgspec.Struct, frozen=True):
    pid: int
    start_ticks: int
    at: float  # monotonic seconds


_decoder = msgspec.json.Decoder(list[Death])


def recent_deaths(engine_dir: Path, window_s: float) -> list[Death]:
    """Return the deaths in the window, oldest first. Ignore future times, which are from before the last boot."""
    try:
        deaths = _decoder.decode((engine_dir / BACKOFF).read_bytes())
    except (OSError, msgspec.DecodeError):
        return []
    now = time.monotonic()
    return [death for death in deaths if now - window_s <= death.at <= now]


def record_death(engine_dir: Path, pid: int, start_ticks: int, window_s: float) -> list[Death]:
    """Add a death, unless it is known, and return the recent ones."""
    deaths = recent_deaths(engine_dir, window_s)
    if not any((death.pid, death.start_ticks) == (pid, start_ticks) for death in deaths):
        deaths.append(Death(pid, start_ticks, time.monotonic()))
        replace_file(engine_dir / BACKOFF, msgspec.json.encode(deaths))
    return deaths
