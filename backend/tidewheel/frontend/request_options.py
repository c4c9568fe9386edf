from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tidewheel.engine.requests import check_labels, check_num_sequences
from tidewheel.errors import InvalidRequest
from tidewheel.request import Priority

MAX_DEADLINE_MS = 30 * 86_400_000.0  # upper bound


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options besides sampling. Raises `InvalidRequest`.

    Deadlines count from arrival. At `deadline_ms`, a running request ends with its output so far and a waiting one is
    refused. After `soft_deadline_ms`, a request is served one class lower.
    """

    n: int = 1  # sequences, with seeds `seed + index`
    priority: Priority = Priority.NORMAL
    tenant: str = ""
    cache_salt: str = ""
    deadline_ms: float | None = None
    soft_deadline_ms: float | None = None
    session_id: str = ""  # per tenant
    session_ttl_s: float | None = None  # None: engine default
    close_session: bool = False  # generates nothing

    def __post_init__(self) -> None:
        check_num_sequences(self.n)
        check_labels(self.tenant, self.cache_salt, self.session_id)
        self._check_deadlines()
        self._check_session()

    def to_wire(self, arrival_ns: int, timeout_us: int = 0) -> dict[str, Any]:
        """Return `AddRequest` fields, with the earlier of `deadline_ms` and `timeout_us`."""
        moments = [_moment(arrival_ns, ms) for ms in (self.deadline_ms, timeout_us * 1e-3 or None) if ms is not None]
        return {
            "n": self.n,
            "priority": int(self.priority),
            "tenant": self.tenant,
            "cache_salt": self.cache_salt,
            "arrival_ns": arrival_ns,
            "deadline_ns": min(moments, default=0),
            "soft_deadline_ns": 0 if self.soft_deadline_ms is None else _moment(arrival_ns, self.soft_deadline_ms),
            "session_id": self.session_id,
            "session_ttl_s": self.session_ttl_s,
        }

    def _check_deadlines(self) -> None:
        for name in ("deadline_ms", "soft_deadline_ms"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise InvalidRequest(f"{name} is {value:g}: it must be above 0, in milliseconds from the arrival")
        if self.deadline_ms is None or self.soft_deadline_ms is None:
            return
        if self.soft_deadline_ms >= self.deadline_ms:
            raise InvalidRequest(
                f"soft_deadline_ms is {self.soft_deadline_ms:g} and deadline_ms {self.deadline_ms:g}: "
                "the soft one must come first"
            )

    def _check_session(self) -> None:
        ttl = self.session_ttl_s
        if ttl is not None and not 0.0 < ttl < math.inf:
            raise InvalidRequest(f"session_ttl_s is {ttl:.12g}: it must be above 0, in seconds")
        if not self.session_id and ttl is not None:
            raise InvalidRequest(f"session_ttl_s is {ttl:.12g}, and session_id is not set: set both or none")
        if not self.session_id and self.close_session:
            raise InvalidRequest("close_session is true, and session_id is not set: name the session")
        if self.session_id and self.n > 1:
            raise InvalidRequest(f"n is {self.n} with a session_id: a session goes on from one sequence")


def _moment(arrival_ns: int, milliseconds: float) -> int:
    return arrival_ns + int(min(milliseconds, MAX_DEADLINE_MS) * 1e6)
