import heapq
from collections import Counter
from typing import cast

import numpy as np
import numpy.typing as npt

from tidewheel.batch import BoolArray, Float64Array, Int32Array, Int64Array, RowArray, WeightVariant
from tidewheel.config import MAX_DRAFT_TOKENS
from tidewheel.kvcache.prefix import PrefixHit
from tidewheel.request import FULL, QUANTIZED, Request
from tidewheel.stats import EngineStats

NEVER = -np.inf
NO_STOP = -1  # padding
PACE_AIM = 0.97  # of times per output token, for errors of predicted steps
PATIENCE = 10.0  # of a decoding row, in times per output token of others
NUM_RECENT = 128  # steps before write-back
ALL_PURE = np.iinfo(np.int32).max


class RowColumns:
    """Running requests as arrays [num_rows]. In every row

        num_computed_tokens + num_inflight_tokens <= num_tokens + num_inflight_samples <= max_num_tokens

    The left side is the next position to schedule; samples in flight are known to the device only.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.num_running = 0
        self.running: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.num_prompt_tokens = _int32(num_rows)
        self.num_tokens = _int32(num_rows)
        self.min_num_tokens = _int32(num_rows)  # stop ids count from here
        self.max_num_tokens = _int32(num_rows)
        self.num_computed_tokens = _int32(num_rows)
        self.num_inflight_tokens = _int32(num_rows)
        self.num_inflight_samples = _int32(num_rows)
        self.num_slots = _int32(num_rows)
        self.last_token_times: npt.NDArray[np.float64] = np.full(num_rows, NEVER)
        self.last_step: Int64Array = np.full(num_rows, -1, dtype=np.int64)
        self.epochs: Int64Array = np.zeros(num_rows, dtype=np.int64)  # number of requests that left
        self.stop_token_ids: Int32Array = np.full((1, num_rows), NO_STOP, dtype=np.int32)  # [max ids, num_rows]
        self.classes: npt.NDArray[np.int8] = np.zeros(num_rows, dtype=np.int8)  # 0: no classes
        self.arrival_times: npt.NDArray[np.float64] = np.zeros(num_rows)
        self.sequences: Int64Array = np.zeros(num_rows, dtype=np.int64)
        self.num_preemptions = _int32(num_rows)
        self.num_entered_tokens = _int32(num_rows)
        self.num_shared_slots = _int32(num_rows)
        self.num_paced = 0  # rows with a time per output token
        self.tpots = np.full(num_rows, np.inf)
        self.first_token_times = np.full(num_rows, np.inf)
        self.tenant_ids = _int32(num_rows)
        self.tenant_names = [""] * num_rows  # by id
        self._tenant_ids: dict[str, int] = {}
        self._rows_of_tenants: Counter[str] = Counter()
        self._free_tenant_ids = list(range(num_rows))
        self.keeps_full: BoolArray = np.zeros(num_rows, dtype=np.bool_)  # CRITICAL
        self.variants_used: npt.NDArray[np.int8] = np.zeros(num_rows, dtype=np.int8)  # bits `FULL`, `QUANTIZED`
        self.variants_hashed: npt.NDArray[np.int8] = np.zeros(num_rows, dtype=np.int8)  # one of them
        self.num_pure_tokens = _int32(num_rows)  # leading tokens of the weights that the hashes name
        self.num_recent = _int32(num_rows)
        self._recent: Int32Array = np.zeros((num_rows, NUM_RECENT + MAX_DRAFT_TOKENS), dtype=np.int32)
        self.num_draft_tokens = _int32(num_rows)
        self.num_accepted_draft_tokens = _int32(num_rows)  # of these
        self._requests = np.full(num_rows, None, dtype=object)
        self._last_rows: RowArray = np.empty(0, dtype=np.intp)
        self._last_requests: list[Request] = []
        self.free_rows = list(range(num_rows))  # heap: low rows keep tables compact
        self._left_rows: list[int] = []

    def request(self, row: int) -> Request:
        return cast(Request, self._requests[row])

    def requests(self, rows: RowArray) -> list[Request]:
        """Return the rows' requests, a list that must not be changed."""
        if not (len(rows) == len(self._last_rows) and np.array_equal(rows, self._last_rows)):
            self._last_rows = rows
            self._last_requests = cast(list[Request], self._requests.take(rows).tolist())
        return self._last_requests

    def enter(self, request: Request, hit: PrefixHit, num_blocks: int, block_size: int, service_class: int) -> None:
        row = heapq.heappop(self.free_rows)
        num_prompt_tokens = request.num_prompt_tokens
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.num_tokens[row] = request.num_tokens
        # masks of a grammar handle `min_tokens`
        min_tokens = request.sampling.min_tokens if request.grammar is None else 0
        self.min_num_tokens[row] = num_prompt_tokens + min_tokens
        self.max_num_tokens[row] = request.max_num_tokens
        self.num_computed_tokens[row] = hit.num_tokens
        self.num_inflight_tokens[row] = self.num_inflight_samples[row] = 0
        self.num_slots[row] = num_blocks * block_size
        self.last_token_times[row] = NEVER
        self.last_step[row] = -1
        self._set_stop_ids(row, request.stop_token_ids)
        self._requests[row] = request
        self._last_rows, self._last_requests = self._last_rows[:0], []
        self.num_recent[row] = self.num_draft_tokens[row] = self.num_accepted_draft_tokens[row] = 0
        self.num_entered_tokens[row] = request.num_tokens
        self.num_shared_slots[row] = len(hit.block_ids) * block_size
        self.classes[row] = service_class
        self.keeps_full[row] = request.keeps_full_weights
        self.variants_hashed[row] = hashed = QUANTIZED if request.has_quantized_hashes else FULL
        self.variants_used[row] = request.variants_used | (hashed if hit.num_tokens else 0)
        self.num_pure_tokens[row] = ALL_PURE
        self.arrival_times[row] = request.arrival_time
        self.sequences[row] = request.sequence
        self.num_preemptions[row] = request.num_preemptions
        objective = request.objective
        if objective is not None and objective.tpot_s < np.inf and not request.is_demoted:
            self.num_paced += 1
            self.tpots[row] = PACE_AIM * objective.tpot_s
            self.first_token_times[row] = np.inf if request.first_token_time is None else request.first_token_time
        if (tenant := request.tenant) not in self._tenant_ids:
            self._tenant_ids[tenant] = self._free_tenant_ids.pop()
            self.tenant_names[self._tenant_ids[tenant]] = tenant
        self._rows_of_tenants[tenant] += 1
        self.tenant_ids[row] = self._tenant_ids[tenant]
        self.running[row] = True
        self.num_running += 1
        request.row = row

    def write_back(self, row: int) -> Request:
        request = self.request(row)
        count = int(self.num_recent[row])
        if count:
            request.output_token_ids += self._recent[row, :count].tolist()
            self.num_recent[row] = 0
        return request

    def write_back_some(self, step_id: int) -> None:
        for row in range(step_id % NUM_RECENT, self.num_rows, NUM_RECENT):
            if self.num_recent[row]:
                self.write_back(row)

    def leave(self, row: int) -> None:
        """Free the row; results of steps in flight no longer count for it."""
        request = self.write_back(row)
        if self.last_token_times[row] > NEVER:
            request.last_token_time = float(self.last_token_times[row])
        request.variants_used = int(self.variants_used[row])
        request.num_draft_tokens += int(self.num_draft_tokens[row])
        request.num_accepted_draft_tokens += int(self.num_accepted_draft_tokens[row])
        request.row = -1
        self._requests[row] = None
        self._last_rows, self._last_requests = self._last_rows[:0], []
        if self.tpots[row] < np.inf:
            self.num_paced -= 1
            self.tpots[row] = np.inf
        self.running[row] = False
        self.num_running -= 1
        self.epochs[row] += 1
        heapq.heappush(self.free_rows, row)
        self._left_rows.append(row)
        self._rows_of_tenants[request.tenant] -= 1
        if not self._rows_of_tenants[request.tenant]:
            del self._rows_of_tenants[request.tenant]
            self._free_tenant_ids.append(self._tenant_ids.pop(request.tenant))

    def take_left_rows(self) -> Int32Array:
        left = np.array(self._left_rows, dtype=np.int32)
        self._left_rows.clear()
        return left

    def update_stats(self, stats: EngineStats) -> None:
        running = self.running
        stats.num_running = self.num_running
        stats.num_used_slots = int(self.num_computed_tokens[running].sum())
        stats.num_taken_slots = int(self.num_slots[running].sum())
        stats.num_wasted_slots = stats.num_taken_slots - int(self.num_tokens[running].sum())

    def num_slots_of(self, tenant: str) -> int:
        tenant_id = self._tenant_ids.get(tenant, -1)
        return int(self.num_slots[self.running & (self.tenant_ids == tenant_id)].sum())

    def is_prefilling(self, row: int) -> bool:
        start = self.num_computed_tokens[row] + self.num_inflight_tokens[row]
        return bool(start < self.num_entered_tokens[row])

    def are_ending(self) -> BoolArray:
        return self.running & (self.num_tokens + self.num_inflight_samples >= self.max_num_tokens)

    def gaps(self) -> tuple[RowArray, Int32Array, RowArray]:
        """Return the rows that decode with the positions of their next tokens, and the rows of unfinished prompts.

        A row decodes if just one of its tokens is not computed yet. Rows that end with the steps in flight are left
        out.
        """
        starts = self.num_computed_tokens + self.num_inflight_tokens
        ends = self.num_tokens + self.num_inflight_samples
        missing = (ends - starts) * (self.running & (ends < self.max_num_tokens))
        decode_rows = (missing == 1).nonzero()[0]
        return decode_rows, starts.take(decode_rows), (missing > 1).nonzero()[0]

    def reserve(self, step_id: int, rows: RowArray, num_scheduled_tokens: Int32Array, samples: BoolArray) -> None:
        np.add.at(self.num_inflight_tokens, rows, num_scheduled_tokens)  # a row with drafts repeats
        np.add.at(self.num_inflight_samples, rows, samples.astype(np.int32))
        self.last_step[rows] = step_id

    def note_weights(self, rows: RowArray, starts: Int32Array, weights: WeightVariant) -> RowArray:
        """Record chunks' weights. Return rows whose earlier tokens other weights computed."""
        variant = QUANTIZED if weights == "quantized" else FULL
        self.variants_used[rows] |= variant
        is_new = (self.variants_hashed.take(rows) != variant) & (self.num_pure_tokens.take(rows) > starts)
        mixed: RowArray = rows[is_new]
        self.num_pure_tokens[mixed[::-1]] = starts[is_new][::-1]  # of a repeated row, the first start
        return mixed

    def num_cacheable_tokens(self, row: int) -> int:
        """Return how many computed tokens may be cached: all, unless several weights computed the row."""
        return int(min(self.num_computed_tokens[row], self.num_pure_tokens[row]))

    def next_due(self, rows: RowArray) -> Float64Array:
        """Return when the rows' next tokens are due; without a time per token, `PATIENCE` times the least counts.

        A row counts as late by at most as much before its last token, so late rows cannot stop others.
        """
        num_output = (self.num_tokens + self.num_inflight_samples - self.num_prompt_tokens)[rows]
        last, patience = self.last_token_times[rows], PATIENCE * self.tpots.min()
        paced = self.tpots[rows] < np.inf
        due = self.first_token_times[rows] + np.where(paced, self.tpots[rows], 0.0) * num_output
        return np.where(paced, np.maximum(due, last - patience), last + patience)

    def append_tokens(self, rows: RowArray, tokens: Int32Array, num_tokens: Int32Array, now: float) -> list[Request]:
        """Append tokens [n], the `num_tokens`-th [n] of their rows; a row may repeat, in order of its tokens.

        Return the request of each token.
        """
        num_recent = self.num_recent.take(rows) + num_tokens - self.num_tokens.take(rows)
        self._recent[rows, num_recent - 1] = tokens
        self.num_recent[rows] = num_recent
        self.num_tokens[rows] = num_tokens
        self.num_inflight_samples[rows] -= 1
        self.last_token_times[rows] = now
        requests = self.requests(rows)
        for index in (num_tokens == self.num_prompt_tokens.take(rows) + 1).nonzero()[0].tolist():
            requests[index].first_token_time = now
            self.first_token_times[rows[index]] = now
        return requests

    def _set_stop_ids(self, row: int, stop_token_ids: tuple[int, ...]) -> None:
        count, width = len(stop_token_ids), len(self.stop_token_ids)
        if count > width:
            padding = ((0, count - width), (0, 0))
            self.stop_token_ids = np.pad(self.stop_token_ids, padding, constant_values=NO_STOP)
        self.stop_token_ids[:count, row] = stop_token_ids
        self.stop_token_ids[count:, row] = NO_STOP


def _int32(num_rows: int) -> Int32Array:
    return np.zeros(num_rows, dtype=np.int32)
