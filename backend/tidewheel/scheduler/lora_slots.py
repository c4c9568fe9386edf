"""Slots of LoRA adapters on the device.

A request runs with its adapter in a slot, which its row holds until it leaves. A slot without rows goes to the next
adapter in the order of service, the least recently used first. The adapter is loaded right before the step's forward
pass: steps in flight, which may use the slot's last adapter, were launched earlier and are executed first.

Requests that wait for weights or for a slot hold up only others of their adapter. An adapter without a slot, whose
weights are loaded and whose oldest request has waited for

        ageing_s        reserves a slot: once its adapter has had it for ageing_s (a quantum), no more requests enter
    2 · ageing_s        gets that slot: rows that have a new token are preempted

Requests of better classes still enter, and their rows keep their slot. A request of a better class than all rows of a
slot reserves it at once, and a CRITICAL one also gets it at once. Among equals the longest wait comes first: while k
adapters have waited longer, or in better classes, one waits at most (2 + ⌊k / slots⌋) · ageing_s.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from tidewheel.batch import Int32Array, RowArray, ScheduledBatch
from tidewheel.errors import InternalError
from tidewheel.lora import NO_SLOT, Lora, LoraLoad
from tidewheel.request import Priority, Request
from tidewheel.scheduler.columns import RowColumns
from tidewheel.stats import EngineStats

LOOK_AHEAD = 64  # waiting requests whose adapters are loaded early
_NO_CLASS = Priority.LOW + 1


@dataclass(eq=False, slots=True)
class _Slot:
    number: int
    lora: Lora | None = None
    num_rows: int = 0
    assigned_at: float = -math.inf  # when its adapter got it
    last_use: float = -math.inf  # when a row last entered or left
    reserved_for: Request | None = None


class LoraSlots:
    """Slots with their adapters, the rows that hold them, and the requests that wait for one."""

    def __init__(self, num_slots: int, columns: RowColumns, stats: EngineStats) -> None:
        self.load: Callable[[Lora], None] = lambda _: None  # asks for weights, or does nothing
        self.now = 0.0  # of the step
        self._columns = columns
        self._stats = stats
        self.ageing_s = math.inf
        self.by_class = False
        self._slots = [_Slot(number) for number in range(num_slots)]
        self._slot_of: dict[Lora, _Slot] = {}
        self._slots_of_rows: Int32Array = np.full(columns.num_rows, NO_SLOT, dtype=np.int32)
        self.waiting: dict[Lora, dict[Request, float]] = {}  # since when, oldest first
        self._refused: dict[Lora, int] = {}  # best class refused in this step, by adapter without a slot
        self._best_classes: list[int] | None = None  # of the slots' rows, in this step
        self._loads: list[LoraLoad] = []

    @property
    def running(self) -> set[Lora]:
        return {slot.lora for slot in self._slots if slot.lora is not None and slot.num_rows}

    @property
    def contents(self) -> list[LoraLoad]:
        return [LoraLoad(slot.number, lora) for lora, slot in self._slot_of.items()]

    def failed_requests(self) -> list[Request]:
        """Return the waiting requests whose adapters could not be read."""
        leaders = [one for lora, group in self.waiting.items() if lora.error is not None for one in group]
        return [member for leader in leaders for member in (*leader.followers, leader)]

    def begin_step(self, candidates: Iterator[Request]) -> list[int]:
        """Ask for the weights of the next adapters. Return rows to preempt for adapters that have waited too long.

        Weights are asked for here alone, since the loader may drop others for them.
        """
        self._refused.clear()
        self._best_classes = None
        first = (request.lora for request in islice(candidates, LOOK_AHEAD) if request.lora is not None)
        nearest = dict.fromkeys(chain(first, self.waiting))
        missing = (lora for lora in nearest if lora.weights is None and lora not in self._slot_of)
        for lora in list(islice(missing, len(self._slots))):
            self.load(lora)
        rows: list[int] = []
        for slot in self._slots:
            if (claimant := slot.reserved_for) is not None:
                is_unused = not slot.num_rows and self.now - slot.last_use >= self.ageing_s
                if claimant.row >= 0 or claimant.is_finished or claimant.lora in self._slot_of or is_unused:
                    slot.reserved_for = None
                else:
                    rows += self._rows_to_preempt(slot, claimant)
        return rows

    def _rows_to_preempt(self, slot: _Slot, claimant: Request) -> list[int]:
        columns = self._columns
        rows = (self._slots_of_rows == slot.number) & ~columns.are_ending()
        if self._seconds_waited(claimant) >= 2.0 * self.ageing_s and self._is_quantum_over(slot):
            rows &= columns.num_tokens > columns.num_entered_tokens  # else short turns would never finish a prompt
            least = self._class_of(claimant)
        elif claimant.service_class is Priority.CRITICAL:
            least = self._best_outranked_class(claimant)
        else:
            return []
        return [int(row) for row in rows.nonzero()[0]] if self._best_class_in(slot) >= least else []

    def admissible(self, candidates: Iterable[Request]) -> Iterator[Request]:
        """Return the requests whose adapter has a slot or can get one. Reserve slots for others."""
        return (one for one in candidates if one.lora is None or self._may_enter(one, one.lora))

    def _may_enter(self, request: Request, lora: Lora) -> bool:
        slot = self._slot_of.get(lora)
        if slot is not None:
            return self._is_open(slot, request)
        service_class = self._class_of(request)
        if service_class >= self._refused.get(lora, _NO_CLASS):
            return False
        if lora.weights is not None:
            if self._free_slot(lora) is None:
                self._reserve(request)
            if self._free_slot(lora) is not None:
                return True
        self._refused[lora] = service_class
        return False

    def _free_slot(self, lora: Lora) -> _Slot | None:
        """Return the adapter's slot-to-be: one reserved for it, an empty one, or the least recently used."""

        def place(slot: _Slot) -> tuple[bool, bool, bool, float]:
            return slot.reserved_for is None, slot.lora is not None, slot.lora in self.waiting, slot.last_use

        empty = (slot for slot in self._slots if not slot.num_rows)
        return min(
            (s for s in empty if s.reserved_for is None or s.reserved_for.lora is lora), key=place, default=None
        )

    def _is_open(self, slot: _Slot, request: Request) -> bool:
        """Return whether a request may enter the slot that its adapter has. Followers enter with their leader."""
        claimant, leader = slot.reserved_for, request.leader
        if claimant is None or (leader is not None and leader.row >= 0 and not request.num_preemptions):
            return True
        is_closing = self._is_quantum_over(slot) or self._best_class_in(slot) >= self._best_outranked_class(claimant)
        return not is_closing or self._class_of(request) < self._class_of(claimant)

    def _reserve(self, request: Request) -> None:
        """Reserve a slot for the request's adapter: the one it had reserved, else the one that closes first."""
        before = next((s for s in self._slots if s.reserved_for and s.reserved_for.lora is request.lora), None)
        if before is not None:
            before.reserved_for = None
        least = self._class_of(request)
        if self._seconds_waited(request) < self.ageing_s:
            least = self._best_outranked_class(request)
        claim = self._claim_of(request)
        slots = [
            slot
            for slot in self._slots
            if self._best_class_in(slot) >= least
            and (slot.reserved_for is None or claim < self._claim_of(slot.reserved_for))
        ]

        def place(slot: _Slot) -> tuple[bool, bool, float, int]:
            closes_at = max(slot.assigned_at + self.ageing_s, self.now)
            return slot is not before, slot.reserved_for is not None, closes_at, slot.num_rows

        if slots:
            min(slots, key=place).reserved_for = request

    def _is_quantum_over(self, slot: _Slot) -> bool:
        return self.now - slot.assigned_at >= self.ageing_s

    def _claim_of(self, request: Request) -> tuple[int, float]:
        return self._class_of(request), -self._seconds_waited(request)

    def _best_outranked_class(self, request: Request) -> int:
        """Return the best class whose rows give way to the request; ageing does not count."""
        return max(request.service_class, request.priority) + 1 if self.by_class else _NO_CLASS

    def _seconds_waited(self, request: Request) -> float:
        """Return how long the oldest request of the request's adapter has waited."""
        assert request.lora is not None
        return self.now - next(iter(self.waiting[request.lora].values()))

    def _class_of(self, request: Request) -> int:
        return request.service_class if self.by_class else 0

    def _best_class_in(self, slot: _Slot) -> int:
        if self._best_classes is None:
            best = np.full(len(self._slots) + 1, _NO_CLASS)  # the last is that of rows without an adapter
            np.minimum.at(best, self._slots_of_rows, self._columns.classes)
            self._best_classes = best.tolist()
        return self._best_classes[slot.number]

    def wait(self, request: Request, lora: Lora, since: float) -> None:
        self.waiting.setdefault(lora, {})[request] = since

    def stop_waiting(self, request: Request, lora: Lora) -> None:
        del self.waiting[lora][request]
        if not self.waiting[lora]:
            del self.waiting[lora]

    def enter(self, request: Request, lora: Lora) -> None:
        """Let the request's row hold its adapter's slot; order the load if the adapter has none."""
        slot = self._slot_of.get(lora) or self._give_slot(lora)
        slot.num_rows += 1
        slot.last_use = self.now
        self._slots_of_rows[request.row] = slot.number

    def _give_slot(self, lora: Lora) -> _Slot:
        # One that may enter does, though a request that was looked at after it has reserved the slot.
        slot = self._free_slot(lora) or next((one for one in self._slots if not one.num_rows), None)
        if slot is None:
            raise InternalError(f"adapter {lora.name!r} was let in, and no slot is free")
        if slot.lora is not None:
            del self._slot_of[slot.lora]
            self._stats.num_lora_evictions += 1
        for one in self._slots:
            if one is slot or (one.reserved_for is not None and one.reserved_for.lora is lora):
                one.reserved_for = None
        slot.lora, slot.assigned_at = lora, self.now
        self._slot_of[lora] = slot
        self._loads.append(LoraLoad(slot.number, lora))
        self._stats.num_lora_loads += 1
        return slot

    def leave(self, row: int) -> None:
        slot = self._slots[self._slots_of_rows[row]]
        slot.num_rows -= 1
        slot.last_use = self.now
        self._slots_of_rows[row] = NO_SLOT

    def discard_loads(self, loads: Iterable[LoraLoad]) -> None:
        """Empty the slots whose loads may not have reached the device; no row holds them."""
        for number, lora in loads:
            slot = self._slots[number]
            if slot.lora is lora and not slot.num_rows:
                del self._slot_of[lora]
                slot.lora = None

    def with_slots(self, batch: ScheduledBatch, rows: RowArray) -> ScheduledBatch:
        """Return the batch with its rows' slots and the loads before it."""
        if not self._slot_of:
            return batch
        slots = self._slots_of_rows.take(rows)
        if slots.max() == NO_SLOT:
            return batch
        loads, self._loads = tuple(self._loads), []
        return replace(batch, lora_slots=slots, lora_loads=loads)
