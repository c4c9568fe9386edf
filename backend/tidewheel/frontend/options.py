"""How a request is served, beside how it samples: class, tenant, deadlines, session, number of sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tidewheel.errors import InvalidRequest
from tidewheel.request import Priority
from tidewheel.tenants import MAX_TENANT_CHARS

MAX_SEQUENCES = 16
MAX_CACHE_SALT_BYTES = 256
MAX_SESSION_ID_BYTES = 256
MAX_DEADLINE_MS = 30 * 86_400_000.0  # later ones count as this: nothing runs so long


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Raises `InvalidRequest` naming the field, the value and the limit.

    Deadlines are milliseconds from the arrival. After `deadline_ms` a request that runs ends with what it has, and
    one that never started is refused; after `soft_deadline_ms` it is served one class lower.
    """

    n: int = 1  # sequences; each samples with the request's seed plus its index
    priority: Priority = Priority.NORMAL
    tenant: str = ""
    cache_salt: str = ""
    deadline_ms: float | None = None
    soft_deadline_ms: float | None = None
    session_id: str = ""  # of the tenant
    session_ttl_s: float | None = None  # None: the engine's default
    close_session: bool = False  # nothing is generated

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_SEQUENCES:
            raise InvalidRequest(f"n is {self.n}: it must be 1 to {MAX_SEQUENCES}")
        if len(self.tenant) > MAX_TENANT_CHARS:
            raise InvalidRequest(f"tenant has {len(self.tenant)} characters: at most {MAX_TENANT_CHARS} are allowed")
        _check_bytes("cache_salt", self.cache_salt, MAX_CACHE_SALT_BYTES)
        _check_bytes("session_id", self.session_id, MAX_SESSION_ID_BYTES)
        self._check_deadlines()
        self._check_session()

    def to_wire(self, arrival_ns: int, timeout_us: int = 0) -> dict[str, Any]:
        """Fields of an `AddRequest`. The earlier of `deadline_ms` and `timeout_us` (0: none) is its deadline."""
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
            raise InvalidRequest(f"session_ttl_s is {ttl:g}: it must be above 0, in seconds")
        if not self.session_id and ttl is not None:
            raise InvalidRequest(f"session_ttl_s is {ttl:g}, and session_id is not set: set both or none")
        if not self.session_id and self.close_session:
            raise InvalidRequest("close_session is true, and session_id is not set: name the session")
        if self.session_id and self.n > 1:
            raise InvalidRequest(f"n is {self.n} with a session_id: a session goes on from one sequence")


def _moment(arrival_ns: int, milliseconds: float) -> int:
    return arrival_ns + int(min(milliseconds, MAX_DEADLINE_MS) * 1e6)


def _check_bytes(name: str, text: str, limit: int) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise InvalidRequest(f"{name} has {size} bytes: at most {limit} are allowed")
