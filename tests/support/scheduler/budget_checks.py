"""Checks of any step: no token of the budget is left over, and a prompt that is cut short has its share."""

from __future__ import annotations

from collections.abc import Sequence

from support.scheduler.scheduler_model import Model
from support.scheduler.scheduling import SchedulerDriver
from tidewheel.batch import ScheduledBatch
from tidewheel.request import Request


def check_budget(driver: SchedulerDriver, batch: ScheduledBatch, waiting: list[Request]) -> None:
    """Check that nothing is left while a prompt could take it: a running one, or one that may enter."""
    config, stats = driver.config, driver.scheduler.stats()
    if batch.num_tokens >= stats.token_budget:
        return
    counts = scheduled_tokens(batch)
    for row, num_tokens in missing_tokens(driver).items():
        assert num_tokens <= 1 or counts.get(row) == config.long_prefill_token_threshold
    has_row = stats.num_running < min(stats.max_num_seqs, config.num_rows)
    if any(may_await_prefix(driver, request) for request in waiting):
        return
    if waiting and has_row and config.strategy.name == "continuous":
        # The tail of a session is held while it is copied.
        most_blocks = max(driver.kv.num_blocks_for(r.num_tokens) + bool(r.session_id) for r in waiting)
        most_growth = max(sum(r.max_tokens for r in (request, *request.followers)) for request in waiting)
        growth = driver.kv.num_blocks_for(most_growth + most_growth_of(driver)) if config.admit_by_growth else 0
        assert stats.num_free_blocks < most_blocks + int(config.watermark * stats.num_blocks) + growth


def check_shares(driver: SchedulerDriver, batch: ScheduledBatch, model: Model, num_victims: int) -> None:
    """Check that a prompt that is cut short gets at least as much as the prompts behind it together.

    Prompts behind it are of its level, or of its level without ageing, and have less than half as much to compute.
    Tokens of rows that left while the step was planned go to them.
    """
    if model.config.policy == "fair":
        return  # counters, which move in the step, decide who is behind whom
    missing, counts = missing_tokens(driver), scheduled_tokens(batch)
    entered = {new.row for new in batch.new_rows}
    running = [driver.scheduler._state.columns.request(row) for row in missing]
    chunks = sorted((r for r in running if counts.get(r.row, 0) > (r.row not in entered)), key=model.key)
    for index, cut in enumerate(chunks):
        if missing[cut.row] < 1 or counts[cut.row] == model.config.long_prefill_token_threshold:
            continue
        behind = [r for r in chunks[index + 1 :] if not {r.row, cut.row} <= entered or not overtakes(model, r, cut)]
        assert sum(counts[other.row] for other in behind) <= counts[cut.row] + num_victims
        for other in behind:
            assert model.level(other) <= model.shared_level(cut)
            assert 2 * (missing[other.row] + counts[other.row]) < missing[cut.row] + counts[cut.row]


def overtakes(model: Model, request: Request, cut: Request) -> bool:
    """Return whether a cached prefix may have taken the request past one that entered in the same step."""
    return model.config.policy == "priority" and model.class_of(request) == model.class_of(cut)


def most_growth_of(driver: SchedulerDriver) -> int:
    """Count the tokens that running requests may still add."""
    columns = driver.scheduler._state.columns
    lefts = columns.max_num_tokens - columns.num_tokens
    return int(lefts[columns.running].clip(0).sum())


def may_await_prefix(driver: SchedulerDriver, request: Request, left: Sequence[Request] = ()) -> bool:
    """Return whether a running request, or one that `left` its row now, has a full block of the same tokens."""
    if not driver.kv.prefixes.is_enabled:
        return False
    salt, wanted = driver._salt_of(request.request_id), tokens_of(request)[:-1]
    running = [r for r in driver.requests.values() if r.row >= 0 or r in left]
    same = [tokens_of(r) for r in running if r is not request and driver._salt_of(r.request_id) == salt]
    return any(wanted[: driver.runner.block_size] == tokens[: driver.runner.block_size] for tokens in same)


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
