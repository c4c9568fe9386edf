"""What a marathon saw. Times are seconds from its start."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

RECOVERY_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Call:
    """A canary, which a client sends again while errors are retryable, or a request of the load, sent once."""

    way: str
    sent: float
    ended: float
    is_canary: bool = False
    error: str = ""  # code of the last attempt; empty: answered, or cancelled by its client
    first_error: str = ""  # code of the first attempt
    first_token: float | None = None  # seconds from its sending
    num_tokens: int = 0
    has_right_tokens: bool = True  # so far as they came


@dataclass(slots=True)
class Fault:
    kind: str
    began: float
    ended: float = math.nan
    recovered: float = math.nan  # infinite: not within the limit
    opens_window: bool = True  # False: canaries may not notice it
    surprise: str = ""  # what went wrong in making it, or in its own requests

    @property
    def recovery_s(self) -> float:
        return self.recovered - self.ended

    @property
    def window(self) -> tuple[float, float]:
        return self.began, min(self.recovered, self.ended + RECOVERY_LIMIT_S)


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of the server; NaN while they cannot be read."""

    at: float
    memory: float  # private bytes of all processes
    descriptors: float
    threads: float
    running: float = math.nan  # requests
    waiting: float = math.nan
    kv_use: float = math.nan  # share of the KV blocks


@dataclass(frozen=True, slots=True)
class Rest:
    """What an idle server holds; NaN: it has ended."""

    kv_use: float
    unfinished: float  # requests that run or wait
    memory: float
    descriptors: float
    threads: float
    shared_memory: float  # bytes
    files: list[str]  # of the run folder and logs
    processes: dict[str, int]  # by name


@dataclass(slots=True)
class Run:
    seconds: float
    rate: float  # requests offered a second, canaries not counted
    before: Rest
    after: Rest
    calls: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    bad_lines: list[str] = field(default_factory=list)  # of the logs
    left_over: list[str] = field(default_factory=list)  # after the end of the server
    exit_status: int = 0

    def is_inside(self, call: Call) -> bool:
        """Return whether some of the call lies in the window of a fault."""
        windows = (fault.window for fault in self.faults if fault.opens_window)
        return any(begin <= call.ended and call.sent <= end for begin, end in windows)
