"""Live requests, from submission to the last response, and their new tokens.

    submitted ── attach ──► at the engine ── deltas ──►┐
        │                    │        ▲                ├──► over ── mark_answered ──► answered
        │                    └─ held ─┘                │
        └── end (error, cancel) ─┴── end ──────────────┘

The first end counts: last delta, cancel, error or deadline.
"""

import itertools
import threading
from collections.abc import Callable

import numpy as np
from msgspec.structs import force_setattr

from tidewheel.batch import BoolArray, Float64Array, Int32Array, Int64Array
from tidewheel.engine.messages import WHOLE_REQUEST, Delta
from tidewheel.errors import DeadlineExceeded, TidewheelError, require
from tidewheel.frontend.output import Sink
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.request_reader import PreparedRequest
from tidewheel.request import FinishReason
from tidewheel.request_options import RequestOptions

_SLOT_BITS = 20
_SLOTS = (1 << _SLOT_BITS) - 1
_FIRST_SLOTS = 256
_WIDTH = 32  # tokens of a request; more spill into a list
_NO_KEY = -1
_FEW = 8  # requests of a step

Ending = str | TidewheelError  # finish reason of the unfinished sequences, or error of the request


class LiveRequest:
    """Request that a front end's threads share. A sender's *turn*, one at a time, sends all new output at once."""

    def __init__(self, key: int, asked: GenerateRequest, sink: Sink, urgency: RequestOptions) -> None:
        self.key = key
        self.asked = asked
        self.sink = sink
        self.arrival_ns = asked.arrival_ns
        self.urgency = urgency
        self.deadline_ns = urgency.deadline_ns(asked.arrival_ns, asked.timeout_us)
        self.expires_ns = self.deadline_ns  # when the watcher ends it; 0: never
        self.is_known_to_engine = False  # which watches its deadline
        self.was_accepted = False  # has tokens, or ended without refusal
        self.has_output = False
        self.first_output_ns = 0  # first token
        self.num_responses = 0  # used only in turns
        self.last_token_ns: dict[int, int] = {}  # of all sequences but the first; of the listener thread
        self.prepared = PreparedRequest()  # its outputs are used only in turns
        self._lock = threading.RLock()
        self._deltas: list[Delta] = []
        self._ending: Ending | None = None
        self._num_open = 1  # sequences not ended by the engine
        self._ends: list[DeadlineExceeded | None] = []  # of sequences; errors of those that never started
        self.is_at_engine = False
        self._has_turn = False  # queued or running
        self._is_answered = False
        self.wants_chunks = False  # before the end

    @property
    def is_over(self) -> bool:
        return self._ending is not None

    @property
    def has_left_engine(self) -> bool:
        return self._num_open == 0

    @property
    def has_deltas(self) -> bool:
        return bool(self._deltas)

    def attach(self, prepared: PreparedRequest, submit: Callable[[GenerateRequest, Sink], None]) -> None:
        """Set the prepared request. Without streaming and stop strings, output is sent only at the end.

        `prepared.speech` takes the responses, unless the request has ended, and may `submit` others. Raise `Busy`.
        """
        with self._lock:
            self.prepared = prepared
            if prepared.message is not None:
                self._num_open = prepared.message.options.n
            self.wants_chunks = self.asked.stream or prepared.has_stop_strings
            if prepared.speech is not None and self._ending is None:
                self.sink = prepared.speech.begin(self.sink, submit)

    def mark_sent(self) -> bool:
        """Mark the request as at the engine. Return False if the engine must drop it."""
        with self._lock:
            self.is_at_engine = True
            return self._ending is None or self._num_open == 0

    def mark_held(self) -> bool:
        """Mark a refused request, to be sent again. Return False if it has ended."""
        with self._lock:
            self.is_at_engine = self.is_known_to_engine = False
            return self._ending is None

    def receive_first(self) -> bool:
        """Record the first output. Return whether to queue the request for a sender."""
        with self._lock:
            self.has_output = self.was_accepted = True
            return self.wants_chunks and self._ending is None and self.claim_turn()

    def receive(self, delta: Delta) -> bool:
        """Take new output of the engine. Return whether to queue the request for a sender."""
        with self._lock:
            if delta.stats is not None:
                force_setattr(delta.stats, "arrival_ns", self.arrival_ns)
            is_first = bool(delta.token_ids) and not self.has_output
            self.has_output = self.has_output or is_first
            self.was_accepted = self.was_accepted or delta.stats is not None or is_first
            ending = self._count_end(delta) if delta.finish_reason else None
            if self._ending is not None:
                return False
            self._deltas.append(delta)
            self._ending = ending
            return (ending is not None or (is_first and self.wants_chunks)) and self.claim_turn()

    def end(self, ending: Ending) -> bool:
        """Set the ending if it is the first. Return True, at most once, if the engine must drop the request."""
        with self._lock:
            if self._ending is None:
                self._ending = ending
                if isinstance(ending, TidewheelError):  # whose frames hold the request and its prompt
                    ending.__traceback__ = ending.__context__ = None
            must_tell = self.is_at_engine and self._num_open > 0
            self.is_at_engine = False
            return must_tell

    def claim_turn(self) -> bool:
        with self._lock:
            if self._has_turn or self._is_answered:
                return False
            self._has_turn = True
            return True

    def take_output(self) -> tuple[list[Delta], Ending | None]:
        with self._lock:
            deltas, self._deltas = self._deltas, []
            return deltas, self._ending

    def mark_answered(self) -> bool:
        """Mark the last response as sent. Return True if the engine must drop the request."""
        with self._lock:
            self._is_answered = True
            self._deltas.clear()
            return self.end("")

    def end_turn(self) -> bool:
        """Return whether to queue the request again."""
        with self._lock:
            self._has_turn = not self._is_answered and self._ending is not None
            return self._has_turn

    def _count_end(self, delta: Delta) -> Ending | None:
        error = None if delta.error is None else delta.error.to_error()
        if delta.index == WHOLE_REQUEST:
            self._num_open = 0
            return error or delta.finish_reason
        self._num_open -= 1
        if error is not None and not isinstance(error, DeadlineExceeded):
            return error
        self._ends.append(error)
        if self._num_open:
            return None
        expired = [end for end in self._ends if end is not None]
        if not expired:
            return delta.finish_reason
        return expired[-1] if len(expired) == len(self._ends) else FinishReason.DEADLINE


class TokenColumns:
    """New tokens of open requests, in arrays with one index (slot) per request. Thread-safe.

    A key is a serial number and, in its low bits, the slot, so that tokens of closed requests find none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serials = itertools.count(1)
        self._free: list[int] = []
        self._spilled: dict[int, list[int]] = {}  # by slot
        self._keys: Int64Array = np.empty(0, np.int64)
        self._tokens: Int32Array = np.empty((0, _WIDTH), np.int32)
        self._num_tokens: Int32Array = np.empty(0, np.int32)  # not yet taken
        self._token_ns: Int64Array = np.empty(0, np.int64)  # of the newest; 0: none
        self._taken_ns: Int64Array = np.empty(0, np.int64)
        self._has_output: BoolArray = np.empty(0, np.bool_)  # for the next turn
        self._is_awaited: BoolArray = np.empty(0, np.bool_)  # to be sent, and no turn is under way
        self._grow()

    def open(self) -> int:
        with self._lock:
            if not self._free:
                self._grow()
            slot = self._free.pop()
            key = next(self._serials) << _SLOT_BITS | slot
            self._keys[slot] = key
            self._num_tokens[slot] = self._token_ns[slot] = self._taken_ns[slot] = 0
            self._has_output[slot] = self._is_awaited[slot] = False
            return key

    def close(self, key: int) -> None:
        slot = key & _SLOTS
        with self._lock:
            if self._keys[slot] == key:
                self._keys[slot] = _NO_KEY
                self._is_awaited[slot] = False
                self._spilled.pop(slot, None)
                self._free.append(slot)

    def await_tokens(self, key: int, *, has_output: bool = False) -> None:
        """Let `due` return the key once its request has output."""
        slot = key & _SLOTS
        with self._lock:
            self._is_awaited[slot] = self._keys.item(slot) == key
            self._has_output[slot] |= has_output and self._is_awaited[slot]

    def add(self, keys: Int64Array, token_ids: Int32Array, now_ns: int) -> tuple[Float64Array, list[int]]:
        """Add a token per key. Return seconds since the previous tokens, and the keys without one."""
        if len(keys) <= _FEW:
            return self._add_few(keys.tolist(), token_ids.tolist(), now_ns)
        with self._lock:
            slots = keys & _SLOTS
            known = self._keys.take(slots, mode="clip") == keys
            if not known.all():
                keys, slots, token_ids = keys[known], slots[known], token_ids[known]
            places = self._num_tokens.take(slots) % _WIDTH
            self._tokens[slots, places] = token_ids
            self._num_tokens[slots] += 1
            self._has_output[slots] = True
            for slot in slots[places == _WIDTH - 1].tolist():
                self._spilled.setdefault(slot, []).extend(self._tokens[slot].tolist())
            since_ns = self._token_ns.take(slots)
            self._token_ns[slots] = now_ns
        is_first = since_ns == 0
        return (now_ns - since_ns[~is_first]) * 1e-9, keys[is_first].tolist()

    def _add_few(self, keys: list[int], token_ids: list[int], now_ns: int) -> tuple[Float64Array, list[int]]:
        seconds, first = [], []
        with self._lock:
            for key, token_id in zip(keys, token_ids, strict=True):
                slot = key & _SLOTS
                if slot >= len(self._keys) or self._keys.item(slot) != key:
                    continue
                place = self._num_tokens.item(slot) % _WIDTH
                self._tokens[slot, place] = token_id
                self._num_tokens[slot] += 1
                self._has_output[slot] = True
                if place == _WIDTH - 1:
                    self._spilled.setdefault(slot, []).extend(self._tokens[slot].tolist())
                if since_ns := self._token_ns.item(slot):
                    seconds.append((now_ns - since_ns) * 1e-9)
                else:
                    first.append(key)
                self._token_ns[slot] = now_ns
        return np.array(seconds, np.float64), first

    def note_output(self, key: int) -> None:
        """Mark that a `Delta` brought output."""
        slot = key & _SLOTS
        with self._lock:
            self._has_output[slot] = self._keys[slot] == key

    def note_token(self, key: int, now_ns: int) -> int:
        """Record a `Delta`'s token. Return the previous token's time (ns), or 0."""
        slot = key & _SLOTS
        with self._lock:
            if self._keys[slot] != key:
                return 0
            since_ns, self._token_ns[slot] = int(self._token_ns[slot]), now_ns
            return since_ns

    def take(self, key: int, now_ns: int) -> list[int]:
        """Remove and return a request's new tokens, to be sent at `now_ns`."""
        slot = key & _SLOTS
        with self._lock:
            if self._keys.item(slot) != key:
                return []
            taken: list[int] = self._tokens[slot, : self._num_tokens.item(slot) % _WIDTH].tolist()
            if self._spilled:
                taken = self._spilled.pop(slot, []) + taken
            self._num_tokens[slot] = 0
            self._has_output[slot] = False
            self._taken_ns[slot] = now_ns
            return taken

    def due(self, before_ns: int) -> list[int]:
        """Return awaited keys with output, last taken by `before_ns`, earliest first; stop awaiting them."""
        with self._lock:
            slots = (self._is_awaited & self._has_output).nonzero()[0]
            if not len(slots):
                return []
            taken_ns = self._taken_ns.take(slots)
            is_due = taken_ns <= before_ns
            due = slots[is_due][np.argsort(taken_ns[is_due], kind="stable")]
            self._is_awaited[due] = False
            keys: list[int] = self._keys.take(due).tolist()
            return keys

    def num_awaited(self) -> int:
        return int(np.count_nonzero(self._is_awaited))

    def next_taken_ns(self) -> int | None:
        """Return the earliest time (ns) of a last `take` among awaited keys with output, or None."""
        with self._lock:
            taken_ns = self._taken_ns[self._is_awaited & self._has_output]
        return int(taken_ns.min()) if len(taken_ns) else None

    def _grow(self) -> None:
        num_slots = len(self._keys)
        added = min(max(num_slots, _FIRST_SLOTS), _SLOTS + 1 - num_slots)
        require(added > 0, f"{num_slots} requests are open")
        self._keys = np.pad(self._keys, (0, added), constant_values=_NO_KEY)
        self._tokens = np.pad(self._tokens, ((0, added), (0, 0)))
        self._num_tokens = np.pad(self._num_tokens, (0, added))
        self._token_ns = np.pad(self._token_ns, (0, added))
        self._taken_ns = np.pad(self._taken_ns, (0, added))
        self._has_output = np.pad(self._has_output, (0, added))
        self._is_awaited = np.pad(self._is_awaited, (0, added))
        self._free.extend(range(num_slots + added - 1, num_slots - 1, -1))
