"""Checks of any step: no token of the budget is left over, and a prompt that is cut short has its share."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from support.scheduler.scheduler_model import Model
from support.scheduler.scheduling import SchedulerDriver
from tidewheel.batch import ScheduledBatch
from tidewheel.request import Priority, Request


def check_budget(driver: SchedulerDriver, batch: ScheduledBatch, waiting: list[Request], *, is_scarce: bool) -> None:
    """Check that nothing is left while a prompt could take it: a running one, or one that may enter.

    Where running requests lacked blocks, only CRITICAL ones may, for which classes have to count.
    """
    config, stats = driver.config, driver.scheduler.stats()
    if batch.num_tokens >= stats.token_budget:
        return
    counts = scheduled_tokens(batch)
    for row, num_tokens in missing_tokens(driver).items():
        assert num_tokens <= 1 or counts.get(row) == config.long_prefill_token_threshold
    has_row = stats.num_running < min(stats.max_num_seqs, config.num_rows)
    if any(may_await_prefix(driver, request) for request in waiting):
        return
    if is_scarce:
        by_class = config.policy not in ("fifo", "fair")  # a tenant's turn may come before a CRITICAL request
        waiting = [request for request in waiting if by_class and request.service_class is Priority.CRITICAL]
    if waiting and has_row and config.scheduling_strategy == "continuous":
        # The tail of a session is held while it is copied.
        most_blocks = max(driver.kv.num_blocks_for(r.num_tokens) + bool(r.session_id) for r in waiting)
        most_growth = max(sum(r.max_tokens for r in (request, *request.followers)) for request in waiting)
        growth = driver.kv.num_blocks_for(most_growth + most_growth_of(driver)) if config.admit_by_growth else 0
        assert stats.num_free_blocks < most_blocks + int(config.watermark * stats.num_blocks) + growth


def check_shares(
    driver: SchedulerDriver,
    batch: ScheduledBatch,
    model: Model,
    num_victims: int,
    waiting: list[Request],
    new: Collection[str],
) -> None:
    """Check that a prompt that is cut short gets at least as much as the prompts behind it together.

    Prompts behind it are of its level, or of its level without ageing, and have less than half as much to compute.
    Tokens of rows that left while the step was planned go to them. Not behind an entering prompt are those that a
    cached prefix took past it, and the prompts under way before the last of these, even if that one did not fit.
    `new` names the requests that were new before the step.
    """
    if model.config.policy == "fair":
        return  # counters, which move in the step, decide who is behind whom
    missing, counts = missing_tokens(driver), scheduled_tokens(batch)
    entered = [driver.requests[entry.request.request_id] for entry in batch.new_rows]
    running = [driver.scheduler._state.columns.request(row) for row in missing]
    chunks = sorted((r for r in running if counts.get(r.row, 0) > (r not in entered)), key=model.key)
    for index, cut in enumerate(chunks):
        if missing[cut.row] < 1 or counts[cut.row] == model.config.long_prefill_token_threshold:
            continue
        preferred = [*entered[: entered.index(cut)], *waiting] if cut in entered else []
        passed = [r for r in preferred if may_overtake(driver, model, r, cut, new)]
        last = max(map(model.key, [cut, *passed]))
        behind = [r for r in chunks[index + 1 :] if r not in passed and (r in entered or model.key(r) > last)]
        assert sum(counts[other.row] for other in behind) <= counts[cut.row] + num_victims
        for other in behind:
            assert model.level(other) <= model.shared_level(cut)
            assert 2 * (missing[other.row] + counts[other.row]) < missing[cut.row] + counts[cut.row]


def may_overtake(
    driver: SchedulerDriver, model: Model, request: Request, rival: Request, new: Collection[str]
) -> bool:
    """Return whether a cached prefix may take one request past another, both of which were `new`."""
    return (
        {request.request_id, rival.request_id} <= set(new)
        and model.may_overtake(request, rival, driver.now)
        and may_be_cached(driver, request)
    )


def most_growth_of(driver: SchedulerDriver) -> int:
    """Count the tokens that running requests may still add."""
    columns = driver.scheduler._state.columns
    lefts = columns.max_num_tokens - columns.num_tokens
    return int(lefts[columns.running].clip(0).sum())


def may_await_prefix(driver: SchedulerDriver, request: Request, left: Sequence[Request] = ()) -> bool:
    """Return whether a running request, or one that `left` its row now, has a full block of the same tokens."""
    return begins_like(driver, request, [r for r in driver.requests.values() if r.row >= 0 or r in left])


def may_be_cached(driver: SchedulerDriver, request: Request) -> bool:
    """Return whether a request that has started, and may be over, has a full block of the same tokens."""
    started = [r for r in driver.requests.values() if r.first_scheduled_time is not None]
    return begins_like(driver, request, started)


def begins_like(driver: SchedulerDriver, request: Request, others: list[Request]) -> bool:
    """Return whether one of the others shares a full block with the request, which computes its last token itself."""
    size, salt = driver.runner.block_size, driver._salt_of(request.request_id)
    first = tokens_of(request)[:-1][:size]
    if len(first) < size or not driver.kv.prefixes.is_enabled:
        return False
    same = (r for r in others if r is not request and driver._salt_of(r.request_id) == salt)
    return any(tokens_of(r)[:size] == first for r in same)


def tokens_of(request: Request) -> list[int]:
    return [*request.prompt_token_ids.tolist(), *request.output_token_ids]


def scheduled_tokens(batch: ScheduledBatch) -> dict[int, int]:
    """Return the number of scheduled tokens by row."""
    return dict(zip(batch.rows.tolist(), batch.num_scheduled_tokens.tolist(), strict=True))


def missing_tokens(driver: SchedulerDriver) -> dict[int, int]:
    """Count, for running rows, the tokens neither computed nor in flight; below 0, those still to be sampled."""
    columns = driver.scheduler._state.columns
    missing = columns.num_tokens - columns.num_computed_tokens - columns.num_inflight_tokens
    return {row: int(missing[row]) for row in columns.running.nonzero()[0].tolist()}
