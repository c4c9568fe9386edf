"""Where every unfinished request is, and its moves from one place to another."""

from __future__ import annotations

from tidewheel.kvcache.invariants import require
from tidewheel.kvcache.manager import KVCacheManager, PrefixHit
from tidewheel.request import FinishReason, Request, RequestState
from tidewheel.scheduler.columns import Columns
from tidewheel.scheduler.policy import Rank
from tidewheel.scheduler.queue import WaitingSet
from tidewheel.scheduler.stats import Counters


class State:
    """Waiting set, running set and block tables; they change together, here and nowhere else.

        wait          → WAITING
        enter         WAITING, PREEMPTED → RUNNING
        preempt       RUNNING → PREEMPTED
        end           any → FINISHED

    Whoever leaves a row while a batch in flight names it leaves two things behind: its blocks, which are held until
    that batch is applied, and a result that nobody wants, told by the row's epoch.
    """

    def __init__(self, kv: KVCacheManager, num_rows: int) -> None:
        self.kv = kv
        self.waiting = WaitingSet()
        self.columns = Columns(num_rows)
        self.requests: dict[str, Request] = {}  # unfinished, in order of arrival
        self.counters = Counters()
        self.last_applied = -1  # newest step that is not in flight any more

    def wait(self, request: Request, rank: Rank) -> None:
        self.requests[request.request_id] = request
        self.waiting.push(rank, request)

    def enter(self, request: Request, hit: PrefixHit, *, keep_free: int) -> list[int] | None:
        """The request takes a free row and blocks for all its tokens; its block table. None if blocks are short."""
        kv, columns = self.kv, self.columns
        row = columns.next_free_row()
        if not kv.allocate(row, request.num_tokens, hit, keep_free=keep_free):
            return None
        blocks = kv.block_table(row)
        columns.enter(
            request,
            self.waiting.remove(request),
            num_cached_tokens=hit.num_tokens,
            num_slots=len(blocks) * kv.block_size,
        )
        request.state = RequestState.RUNNING
        request.num_reused_blocks += len(hit.block_ids)
        request.num_new_blocks += len(blocks) - len(hit.block_ids)
        return list(blocks)

    def preempt(self, row: int) -> None:
        """Back to the waiting set, to be computed again: its output is kept, its blocks are not."""
        request = self.columns.request(row)
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.waiting.push(self._leave(row), request)

    def end(self, request: Request, reason: FinishReason, *, keep_cached: bool = True) -> None:
        """The one place where a request ends. Without `keep_cached`, nothing that it computed is used again."""
        if request.state is RequestState.RUNNING:
            self._leave(request.row, keep_cached=keep_cached)
        else:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        request.state = RequestState.FINISHED
        request.finish_reason = reason

    def _leave(self, row: int, *, keep_cached: bool = True) -> Rank:
        """Row and blocks are given back, the blocks when no batch in flight names them any more; the rank."""
        columns = self.columns
        if keep_cached:
            self.kv.commit(row, columns.request(row), int(columns.num_computed_tokens[row]))
        else:
            self.kv.forget(row)
        last_step = int(columns.last_step[row])
        self.kv.free(row, after_step=last_step if last_step > self.last_applied else None)
        return columns.leave(row)

    def check_invariants(self) -> None:
        """Raises `InternalError` naming what is broken. O(blocks + requests)."""
        self.kv.check_invariants()
        self.columns.check_invariants()
        self.waiting.check_invariants()
        waiting = list(self.waiting)
        states = {request.state for request in waiting}
        require(states <= {RequestState.WAITING, RequestState.PREEMPTED}, f"waiting requests are {states}")
        running = self.columns.requests(self.columns.running.nonzero()[0])
        placed = {request.request_id: request for request in (*waiting, *running)}
        require(len(placed) == len(waiting) + len(running), "a request is in two places")
        require(placed == self.requests, "requests are lost or left over")
        for request in running:
            num_slots = len(self.kv.block_table(request.row)) * self.kv.block_size
            require(int(self.columns.num_slots[request.row]) == num_slots, f"{request} has {num_slots} slots")
