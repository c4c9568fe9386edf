from __future__ import annotations

import itertools
import threading

import numpy as np

from tidewheel.batch import BoolArray, Float64Array, Int32Array, Int64Array
from tidewheel.errors import require

_SLOT_BITS = 20
_SLOTS = (1 << _SLOT_BITS) - 1
_FIRST_SLOTS = 256
_WIDTH = 32  # tokens of a row before they spill into a list
_NO_KEY = -1
_FEW = 8  # requests of a step


class TokenColumns:
    """New tokens of open requests, as arrays. Thread-safe.

    The low bits of a key are the request's slot. The others are unique, so tokens of closed requests find no slot.
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
        """Let `due` return the key once it has output."""
        slot = key & _SLOTS
        with self._lock:
            self._is_awaited[slot] = self._keys.item(slot) == key
            self._has_output[slot] |= has_output and self._is_awaited[slot]

    def add(self, keys: Int64Array, token_ids: Int32Array, now_ns: int) -> tuple[Float64Array, list[int]]:
        """Add one token to each key. Return the seconds since its last one, and keys of first tokens."""
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
        """Add tokens one by one, faster than numpy for a few."""
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
        """Note output that is in no column, once it can be taken."""
        slot = key & _SLOTS
        with self._lock:
            self._has_output[slot] = self._keys[slot] == key

    def note_token(self, key: int, now_ns: int) -> int:
        """Note the time of a token in no column. Return the time of the last one, or 0."""
        slot = key & _SLOTS
        with self._lock:
            if self._keys[slot] != key:
                return 0
            since_ns, self._token_ns[slot] = int(self._token_ns[slot]), now_ns
            return since_ns

    def take(self, key: int, now_ns: int) -> list[int]:
        """Return the tokens added since the last call, made at `now_ns`."""
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
        """Return awaited keys with output and a last turn before `before_ns`, oldest first."""
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
        """Return the oldest last turn of awaited keys with output."""
        with self._lock:
            taken_ns = self._taken_ns[self._is_awaited & self._has_output]
        return int(taken_ns.min()) if len(taken_ns) else None

    def _grow(self) -> None:
        num_slots = len(self._keys)
        added = min(max(num_slots, _FIRST_SLOTS), _SLOTS + 1 - num_slots)
        require(added > 0, f"{num_slots} requests are open")
        self._keys = np.append(self._keys, np.full(added, _NO_KEY))
        self._tokens = np.append(self._tokens, np.zeros((added, _WIDTH), np.int32), axis=0)
        self._num_tokens = np.append(self._num_tokens, np.zeros(added, np.int32))
        self._token_ns, self._taken_ns = (
            np.append(column, np.zeros(added, np.int64)) for column in (self._token_ns, self._taken_ns)
        )
        self._has_output, self._is_awaited = (
            np.append(column, np.zeros(added, np.bool_)) for column in (self._has_output, self._is_awaited)
        )
        self._free.extend(range(num_slots + added - 1, num_slots - 1, -1))
