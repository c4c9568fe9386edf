"""Checks that rows had to leave, counted anew from what each of them held."""

from __future__ import annotations

import re
from collections.abc import Collection

from support.scheduler.budget_checks import may_await_prefix
from support.scheduler.scheduler_model import Model
from support.scheduler.scheduling import SchedulerDriver
from tidewheel.batch import ScheduledBatch
from tidewheel.errors import Busy, KvCacheFull
from tidewheel.request import Priority, Request


def check_shortage(driver: SchedulerDriver, error: Busy) -> None:
    """Check that a refusal that names the cache is true now, and that no row is lacking as well."""
    if not isinstance(error, KvCacheFull):
        return
    figures = re.search(r"KV cache: (\d+) must be free, and (\d+) are$", error.message)
    assert figures is not None, error.message
    needed, free = map(int, figures.groups())
    columns = driver.scheduler._state.columns
    assert free == driver.kv.num_free_blocks < needed
    assert free < driver.kv.num_blocks, "no block is taken"
    assert columns.free_rows
    if not driver.config.enable_seqs_governor:  # which may have lowered it since
        assert columns.num_running < driver.scheduler.stats().max_num_seqs
    assert next(driver.scheduler._state.waiting.candidates(with_new=True)).row < 0


class Blocks:
    """Block tables before a step, by request id, and what is free then, without requests whose deadline passes."""

    def __init__(self, driver: SchedulerDriver, late: Collection[str]) -> None:
        state = driver.scheduler._state
        running = state.columns.running.nonzero()[0].tolist()
        rows = [row for row in running if state.columns.request(row).request_id not in late]
        self.tables = {state.columns.request(row).request_id: set(driver.kv.block_table(row)) for row in rows}
        self.num_free = driver.kv.num_free_blocks
        if not driver.in_flight:  # which may still write to the blocks of late ones
            held = {block for row in running for block in driver.kv.block_table(row)}
            self.num_free += len(held.difference(*self.tables.values()))
        starts = state.columns.num_computed_tokens + state.columns.num_inflight_tokens
        self.growing = {
            state.columns.request(row).request_id for row in rows if starts[row] >= state.columns.num_slots[row]
        }
        self.num_growing = len(self.growing)
        self.computed = {state.columns.request(row).request_id: int(starts[row]) for row in rows}
        self.has_free_row = bool(state.columns.free_rows) or rows != running

    @property
    def are_scarce(self) -> bool:
        """Return whether running requests need more blocks than are free."""
        return self.num_growing > self.num_free

    def num_only_of(self, request_id: str) -> int:
        """Count the blocks of the request that no other request names."""
        others = [table for name, table in self.tables.items() if name != request_id]
        return len(self.tables[request_id].difference(*others))

    def gain(self, request_id: str) -> int:
        """Count the blocks that others could take if the request left alone."""
        return self.num_only_of(request_id) + (request_id in self.growing)


def check_decodes(
    driver: SchedulerDriver, batch: ScheduledBatch, blocks: Blocks, victims: list[Request], model: Model
) -> None:
    """Check, with no other step in flight, that each running request that lacks one token gets it.

    One that needs a block may wait where a request of a higher class had to leave for others of its own class.
    """
    if len(driver.in_flight) > 1:
        return
    rows = driver.runner.rows
    for row in rows.keys() - batch.rows.tolist():
        if len(rows[row].token_ids) - rows[row].num_computed_tokens <= 1:
            request = driver.scheduler._state.columns.request(row)
            assert request.request_id in blocks.growing, f"{request} gets no token"
            assert any(model.counts(victim) < model.counts(request) for victim in victims), f"{request} waits"


def check_need(
    driver: SchedulerDriver, blocks: Blocks, victims: list[Request], entered: list[Request], model: Model
) -> None:
    """Check the rows that left for a CRITICAL, with one step in flight.

    They let it enter in the same step, and none of them could have stayed. A CRITICAL waits only where all lower
    classes together would not be enough.
    """
    if len(victims) == 1 and not any(r.num_reused_blocks for r in entered):
        _check_choice(driver, blocks, victims[0], model)
    criticals = [r for r in entered if r.service_class is Priority.CRITICAL and driver.config.policy != "fifo"]
    if blocks.are_scarce:
        return
    assert not victims or criticals, "rows left, and no CRITICAL entered"
    if victims and len(criticals) == 1 and len(entered) == 1 and not driver.kv.stats.num_host_blocks:
        _check_each(driver, blocks, victims, criticals[0])
    if not entered:
        _check_wait(driver, blocks, model)


def _check_choice(driver: SchedulerDriver, blocks: Blocks, victim: Request, model: Model) -> None:
    """Check that of the rows that free as much alone the victim loses least: class, computed tokens, age."""
    limit, requests = driver.config.max_preemptions, driver.requests

    def loss(request: Request, num_preemptions: int) -> tuple[float, ...]:
        arrival = (-part for part in model.arrival(request))
        return (num_preemptions >= limit, -model.counts(request), blocks.computed[request.request_id], *arrival)

    least = loss(victim, victim.num_preemptions - 1)
    running = [requests[name] for name in blocks.tables if not requests[name].is_finished]
    protected = model.protected(running)
    for other in running:
        if other is victim or other is protected or model.counts(other) < model.counts(victim):
            continue  # no row leaves for one of a lower class
        sits_out = blocks.are_scarce and model.counts(other) > model.counts(victim)
        gain = blocks.num_only_of(other.request_id) if sits_out else blocks.gain(other.request_id)
        if gain < blocks.gain(victim.request_id):
            continue
        assert least < loss(other, other.num_preemptions), f"{other} would have lost less than {victim}"


def _check_each(driver: SchedulerDriver, blocks: Blocks, victims: list[Request], critical: Request) -> None:
    """Check that every victim was needed for its row or for its blocks."""
    columns, kv = driver.scheduler._state.columns, driver.kv
    needs_row = not blocks.has_free_row or columns.num_running >= driver.scheduler.stats().max_num_seqs
    if critical.num_preemptions or (needs_row and len(victims) == 1):
        return
    keep_free = int(driver.config.watermark * kv.num_blocks)  # while others run, as a victim that stays would
    shared = set(kv.block_table(critical.row)[: critical.num_reused_blocks])
    gone = {victim.request_id for victim in victims}
    for victim in victims:
        held = blocks.tables[victim.request_id]
        staying = [table for name, table in blocks.tables.items() if name not in gone]
        num_lost = len(held.difference(*staying) - (shared & held))
        assert kv.num_free_blocks - num_lost < keep_free + 1, f"{victim} need not have left"


def _check_wait(driver: SchedulerDriver, blocks: Blocks, model: Model) -> None:
    """Check that a CRITICAL first in line would not fit even if all lower classes left."""
    config, state = driver.config, driver.scheduler._state
    if config.policy in ("fifo", "fair") or config.scheduling_strategy != "continuous":
        return
    waiting = [r for r in driver.requests.values() if not r.is_finished and r.row < 0 and r in set(state.waiting)]
    head = min(waiting, key=model.key, default=None)
    if head is None or head.service_class is not Priority.CRITICAL or may_await_prefix(driver, head):
        return
    batch = driver.in_flight[-1][0] if driver.in_flight else None
    if batch is not None and batch.num_tokens >= driver.scheduler.stats().token_budget:
        return
    lower = {name for name in blocks.tables if model.counts(driver.requests[name]) > Priority.CRITICAL}
    free = blocks.num_free + sum(blocks.num_only_of(name) for name in lower)
    # The tail of a session is held while it is copied.
    num_blocks = driver.kv.num_blocks_for(head.num_tokens) + bool(head.session_id)
    needed = num_blocks + int(config.watermark * driver.kv.num_blocks)
    has_row = lower or (blocks.has_free_row and len(blocks.tables) < driver.scheduler.stats().max_num_seqs)
    assert not has_row or free < needed + blocks.num_growing, f"{head} waits for nothing"
