import heapq
import threading
from typing import NamedTuple

import msgspec

from tidewheel.engine.messages import AddRequest, Room
from tidewheel.errors import Busy
from tidewheel.frontend.grammar_parameters import names_grammar
from tidewheel.frontend.live_request import LiveRequest
from tidewheel.request import Priority

_AGEING_NS = 10_000_000_000
_LONG_PROMPT_BYTES = 16 << 10
_MAX_REQUESTS = 4096
_MAX_PROMPTS = 64  # of maximum size
_RETRY_AFTER_MS = 250

_Heap = list[tuple[int, int, LiveRequest]]  # order, key (by arrival), request


class _Claim(NamedTuple):
    num_requests: int
    num_tokens: int
    priority: int = 0  # 0: unknown

    @classmethod
    def of(cls, message: AddRequest) -> "_Claim":
        n = message.options.n
        return cls(n, n * (len(message.prompt) // 4), message.options.priority)


_NOTHING = _Claim(0, 0)


class AdmissionGate:
    """Gate that keeps a front end from overfilling the engine's waiting set. Thread-safe, O(1) per request.

    It knows the engine's last `Room` and the requests sent since. While the waiting set is full, `claim` refuses.
    With `holds`, `wait` blocks instead: requests count from submission, and none overtakes a held one.
    """

    def __init__(self, *, holds: bool = False) -> None:
        self.holds = holds
        self._changed = threading.Condition()
        self._room: Room | None = None  # last report
        self._unheard: dict[int, _Claim] = {}  # claims not in that report, by key
        self._num_requests = 0  # sums over `_unheard`
        self._num_tokens = 0
        self._num_by_class = [0] * (max(Priority) + 1)  # index 0: unknown
        self._held: dict[int, _Claim] = {}  # refused by the engine, in order
        self._is_closed = False

    def enter(self, key: int) -> None:
        """Count a submitted request, with `holds` only."""
        if self.holds:
            with self._changed:
                self._count(key, _Claim(1, 0))

    def claim(self, message: AddRequest) -> None:
        """Count a request about to be sent. Raise `WaitingSetFull`."""
        claim = _Claim.of(message)
        with self._changed:
            if self._room is not None and not self.holds:
                self._check(self._room, claim)
            self._count(message.key, claim)

    def hold(self, message: AddRequest) -> bool:
        """Keep a refused request for `release`. Return False without `holds`."""
        with self._changed:
            if self.holds:
                self._held[message.key] = _Claim.of(message)
        return self.holds

    def release(self) -> list[int]:
        """Return keys of held requests that now have room, counted as sent."""
        keys = []
        with self._changed:
            while self._held and self._fits(claim := next(iter(self._held.values()))):
                keys.append(next(iter(self._held)))
                del self._held[keys[-1]]
                self._count(keys[-1], claim)
        return keys

    def wait(self) -> None:
        if self.holds:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or (not self._held and self._fits(_Claim(1, 1))))

    def set_room(self, room: Room | None) -> None:
        """Replace the engine's last report (None: a new engine)."""
        with self._changed:
            if room is not None:
                self._room = room
                for key in room.received:
                    self._count(key, None)
            elif self._room is not None:
                self._room = msgspec.structs.replace(self._room, num_requests=0, num_tokens=0, shortage=None)
            self._changed.notify_all()

    def forget(self, key: int) -> None:
        with self._changed:
            self._held.pop(key, None)
            self._count(key, None)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _check(self, room: Room, claim: _Claim) -> None:
        lowest = max(room.lowest_class, *(priority for priority, num in enumerate(self._num_by_class) if num), 0)
        if claim.priority < lowest or self._fits(claim):
            return  # may displace a lower class
        num_waiting = room.num_requests + self._num_requests
        full = f"{num_waiting} of {room.max_requests} requests"
        if num_waiting + claim.num_requests <= room.max_requests:
            num_tokens = room.num_tokens + self._num_tokens
            full = f"{num_tokens} of {room.max_tokens} tokens, and this prompt has {claim.num_tokens}"
        raise room.refusal(full)

    def _count(self, key: int, claim: _Claim | None) -> None:
        before, after = self._unheard.pop(key, _NOTHING), claim or _NOTHING
        if claim is not None:
            self._unheard[key] = claim
        self._num_requests += after.num_requests - before.num_requests
        self._num_tokens += after.num_tokens - before.num_tokens
        self._num_by_class[before.priority] -= 1
        self._num_by_class[after.priority] += 1

    def _fits(self, claim: _Claim) -> bool:
        room = self._room
        return room is None or (
            room.num_requests + self._num_requests + claim.num_requests <= room.max_requests
            and room.num_tokens + self._num_tokens + claim.num_tokens <= room.max_tokens
        )


class PromptQueue:
    """Requests that wait for tokenisation, counted from `put` to `done`. Thread-safe.

    Sorted by class, then by the earlier of deadline and arrival + `_AGEING_NS`, each of which lifts a waiting request
    a class. Long prompts and grammars leave one thread to short prompts.
    """

    def __init__(self, max_prompt_bytes: int, num_threads: int) -> None:
        self._max_bytes = _MAX_PROMPTS * max_prompt_bytes
        self._max_long = num_threads - 1  # in work at once
        self._short: _Heap = []
        self._long: _Heap = []
        self._num_requests = 0
        self._num_bytes = 0
        self._num_long = 0  # in work
        self._changed = threading.Condition()
        self._is_closed = False

    def refusal(self, num_bytes: int) -> Busy | None:
        full = ""
        if self._num_requests >= _MAX_REQUESTS:
            full = f"{self._num_requests} of {_MAX_REQUESTS} requests"
        elif self._num_bytes + num_bytes > self._max_bytes:
            full = f"{self._num_bytes} of {self._max_bytes} prompt bytes"
        return Busy(f"the tokenizer's queue is full: {full}", retry_after_ms=_RETRY_AFTER_MS) if full else None

    def put(self, request: LiveRequest) -> None:
        urgency, latest_ns = request.urgency, request.arrival_ns + _AGEING_NS
        due_ns = min(request.deadline_ns or urgency.soft_deadline_ns(request.arrival_ns) or latest_ns, latest_ns)
        heap = self._long if _is_long(request) else self._short
        with self._changed:
            heapq.heappush(heap, (due_ns + urgency.priority * _AGEING_NS, request.key, request))
            self._num_requests += 1
            self._num_bytes += request.asked.prompt_bytes
            self._changed.notify()

    def take(self) -> LiveRequest | None:
        """Wait for the next request and return it; None once closed."""
        with self._changed:
            while not self._is_closed:
                heaps = (self._short, self._long) if self._num_long < self._max_long else (self._short,)
                if filled := list(filter(None, heaps)):
                    *_, request = heapq.heappop(min(filled))
                    self._num_long += _is_long(request)
                    return request
                self._changed.wait()
        return None

    def done(self, request: LiveRequest) -> None:
        with self._changed:
            self._num_requests -= 1
            self._num_bytes -= request.asked.prompt_bytes
            self._num_long -= _is_long(request)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _is_long(request: LiveRequest) -> bool:
    asked = request.asked
    return asked.prompt_bytes > _LONG_PROMPT_BYTES or names_grammar(asked.parameters)
