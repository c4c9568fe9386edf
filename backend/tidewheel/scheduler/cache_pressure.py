from collections.abc import Iterable, Sequence

import numpy as np

from tidewheel.batch import Float64Array, RowArray
from tidewheel.kvcache.prefix import PrefixHit
from tidewheel.request import Priority, Request
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.state import SchedulerState
from tidewheel.scheduler.step_plan import StepPlan


def free_blocks_to_grow(state: SchedulerState, needy: RowArray, now: float) -> list[int]:
    """Preempt rows until each `needy` row can grow by a block. Return needy rows that must wait.

    No row is preempted for lower classes alone.
    """
    columns, kv = state.columns, state.kv
    first = protected_row(columns)
    served = needy
    num_coming = kv.num_free_blocks + _num_returning_blocks(state)
    while (num_missing := len(served) - num_coming) > 0:
        lowest_class = int(columns.classes[served].max())
        rows = [row for row in order_of_victims(state, lowest_class) if row != first]
        victims = choose_victims(state, rows, num_missing, growing=served.tolist())
        if victims is not None:
            for row in victims:
                state.preempt(row, now)
            break
        served = served[columns.classes[served] < lowest_class]  # the lowest class waits
    needy = needy[columns.running[needy]]
    num_waiting = max(len(needy) - kv.num_free_blocks, 0)
    if not num_waiting:
        return []
    return sorted(needy.tolist(), key=lambda row: (row != first, state.waiting.key(columns.request(row))))[
        -num_waiting:
    ]


def victims_for(
    state: SchedulerState, plan: StepPlan, request: Request, hit: PrefixHit, *, needs_row: bool
) -> list[int]:
    """Return rows of lower classes to preempt for a CRITICAL request; empty if useless or not needed.

    With fair tenants, only rows ordered after the request: others would enter before it again.
    """
    columns, kv = state.columns, state.kv
    needs_tokens = plan.token_budget < 1
    min_victims = int((needs_row or needs_tokens) and not columns.are_ending().any())
    num_missing = kv.num_missing_blocks(request.num_tokens, hit, keep_free=plan.num_blocks_kept(columns.num_running))
    if num_missing > 0 and state.in_flight:
        starts = columns.num_computed_tokens + columns.num_inflight_tokens + 1
        num_growing_next = int(np.count_nonzero(columns.running & (starts >= columns.num_slots)))
        num_missing += num_growing_next - _num_returning_blocks(state)
    if num_missing <= 0 and not min_victims:
        return []
    planned = plan.chunk_ends
    decoding = set(plan.decode_rows.tolist()) if needs_tokens else None
    rows = [
        row
        for row in order_of_victims(state, Priority.HIGH)
        if row not in planned and (decoding is None or row in decoding)
    ]
    if state.policy.by_tenant:
        place = state.waiting.key(request)
        rows = [row for row in rows if state.waiting.key(columns.request(row)) > place]
    growing = plan.growing_rows.tolist()
    stays = columns.running.copy()
    stays[rows] = False
    num_held, num_kept = int(columns.num_slots[rows].sum()), int(columns.num_slots[stays].max(initial=0))
    most_freed = min(num_held // kv.block_size, kv.num_blocks - kv.num_free_blocks - num_kept // kv.block_size)
    if num_missing > most_freed + len(growing):
        return []
    chosen = choose_victims(state, rows, num_missing, kept=hit.block_ids, growing=growing, min_victims=min_victims)
    return chosen or []


def protected_row(columns: RowColumns) -> int:
    rows = columns.running.nonzero()[0]
    order = np.lexsort((columns.sequences[rows], columns.arrival_times[rows], columns.classes[rows]))
    return int(rows[order[0]])


def order_of_victims(state: SchedulerState, lowest_class: int) -> list[int]:
    """Return rows of `lowest_class` or lower: lowest class, fewest computed tokens, youngest first.

    Rows preempted `max_preemptions` times go last; ending rows are left out.
    """
    columns = state.columns
    rows = (columns.running & ~columns.are_ending() & (columns.classes >= lowest_class)).nonzero()[0]
    order = np.lexsort(
        (
            -columns.sequences[rows],
            -columns.arrival_times[rows],
            columns.num_computed_tokens[rows],
            -columns.classes[rows],
            columns.num_preemptions[rows] >= state.config.max_preemptions,
        )
    )
    return [int(row) for row in rows[order]]


def choose_victims(
    state: SchedulerState,
    rows: Sequence[int],
    num_missing: int,
    *,
    kept: Sequence[int] = (),
    growing: Iterable[int] = (),
    min_victims: int = 0,
) -> list[int] | None:
    """Return the first rows that together free `num_missing` blocks, less superfluous ones; None if all free too few.

    A victim in `growing` saves the block that it was to get. Blocks in `kept` do not count.
    """
    departures = state.kv.departures(kept)
    relieved = set(growing)
    victims: list[int] = []
    for row in rows:
        if num_missing <= 0 and len(victims) >= min_victims:
            break
        victims.append(row)
        num_missing -= departures.add(row) + (row in relieved)
    if num_missing > 0 or len(victims) < min_victims:
        return None
    for row in victims[-2::-1]:  # the last was needed
        loss = departures.num_freed(row) + (row in relieved)
        if loss <= -num_missing and len(victims) > min_victims:
            departures.take_back(row)
            victims.remove(row)
            num_missing += loss
    return victims


def _num_returning_blocks(state: SchedulerState) -> int:
    departures = state.kv.departures()
    ending = state.columns.are_ending().nonzero()[0].tolist() if state.in_flight else []
    return state.kv.transfers.num_returning_blocks() + sum([departures.add(row) for row in ending])


AHEAD: Float64Array = 4.0 * 2.0 ** np.arange(16)  # steps
CAUTION = 2.0  # standard deviations beside the mean


class GrowthForecast:
    """Expected change of used cache slots in t steps: a request has grown by t, or ended and freed its own o slots.

        mean        p · (t + o) - o                 p(t): chance of running on, from `OutputPredictor.survival`
        variance    p · (1 - p) · (t + o)²

    Compare Past-Future scheduling (Gong et al., ASPLOS 2025).
    """

    def __init__(self, state: SchedulerState) -> None:
        columns = state.columns
        rows = columns.running.nonzero()[0]
        self._state = state
        self._rows = rows
        self._num_most = int((columns.max_num_tokens[rows] - columns.num_slots[rows]).clip(0).sum())
        self._newcomers: list[tuple[int, int, int]] = []  # output tokens, tokens left, own slots
        self._curve: tuple[Float64Array, Float64Array] | None = None
        self._of_rows = np.zeros((2, len(AHEAD)))

    def num_missing_slots(self, request: Request, hit: PrefixHit, *, keep_free: int) -> float:
        """Return how many cache slots the request and running ones will lack; if 0, count the request as running."""
        kv = self._state.kv
        num_free = -kv.block_size * kv.num_missing_blocks(request.num_tokens, hit, keep_free=keep_free)
        left = request.max_tokens - request.num_output_tokens
        own = kv.block_size * (kv.num_blocks_for(request.num_tokens) - len(hit.block_ids))
        newcomers = [*self._newcomers, (request.num_output_tokens, left, own)]
        if self._num_most + left > num_free and (num_missing := self._need(newcomers) - num_free) > 0.0:
            return num_missing
        self._num_most += left
        self._newcomers = newcomers
        return 0.0

    def _need(self, newcomers: list[tuple[int, int, int]]) -> float:
        columns, rows = self._state.columns, self._rows
        if self._curve is None:
            outputs = (columns.num_tokens[rows] - columns.num_prompt_tokens[rows]).astype(np.float64)
            lefts = (columns.max_num_tokens[rows] - columns.num_tokens[rows]).astype(np.float64)
            self._curve = self._state.predictor.survival(outputs)
            own = (columns.num_slots[rows] - columns.num_shared_slots[rows]).astype(np.float64)
            self._of_rows = _moments(self._curve, outputs, lefts, own)
        mean, variance = self._of_rows + _moments(self._curve, *np.array(newcomers, dtype=np.float64).T)
        return float((mean + CAUTION * np.sqrt(variance)).max())


def _moments(
    curve: tuple[Float64Array, Float64Array], outputs: Float64Array, lefts: Float64Array, own: Float64Array
) -> Float64Array:
    now = np.interp(outputs, *curve).clip(1e-9)[:, None]
    alive = np.interp(outputs[:, None] + AHEAD, *curve) / now
    alive *= lefts[:, None] > AHEAD
    held = AHEAD + own[:, None]
    mean = (alive * held - own[:, None]).sum(axis=0)
    return np.stack((mean, (alive * (1.0 - alive) * held * held).sum(axis=0)))
