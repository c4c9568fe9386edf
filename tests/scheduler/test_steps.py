"""What a step holds and what it changes, one batch at a time."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from support.engine.fake_runner import naive_output
from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import SchedulerDriver, make_request, make_scheduler
from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.errors import InternalError, InvalidRequest, NumericError
from tidewheel.request import FinishReason, RequestState
from tidewheel.sampling import TopLogprobs


def scheduled(batch: ScheduledBatch | None) -> dict[int, tuple[int, int]]:
    """Row → start and number of tokens."""
    assert batch is not None
    counts = zip(batch.start_positions.tolist(), batch.num_scheduled_tokens.tolist(), strict=True)
    return dict(zip(batch.rows.tolist(), counts, strict=True))


def answer(batch: ScheduledBatch, token_ids: list[int]) -> SampledTokens:
    return SampledTokens(batch.step_id, np.array(token_ids, dtype=np.int32))


def test_a_prompt_is_one_step_and_then_a_token_a_step() -> None:
    driver = SchedulerDriver()
    request = driver.add(make_request(prompt=6, max_tokens=3))
    first = driver.schedule()
    assert first is not None
    assert scheduled(first) == {0: (0, 6)}
    assert first.samples.tolist() == [True]
    (new,) = first.new_rows
    assert (new.row, new.request.request_id, new.token_ids.tolist(), new.request.num_prompt_tokens) == (
        0,
        "a",
        [*range(6)],
        6,
    )
    assert first.block_indices.tolist() == [0, 1]
    driver.apply()
    assert scheduled(driver.schedule()) == {0: (6, 1)}
    driver.apply()
    driver.run()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == naive_output(request)[0]


def test_long_prompts_are_cut_to_the_budget_and_only_the_last_chunk_samples() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=8)
    driver.add(make_request(prompt=20, max_tokens=2))
    chunks = []
    for _ in range(3):
        batch = driver.schedule()
        assert batch is not None
        chunks.append((scheduled(batch)[0], batch.samples.tolist(), batch.num_decodes))
        driver.apply()
    assert chunks == [((0, 8), [False], 0), ((8, 8), [False], 0), ((16, 4), [True], 0)]
    driver.run()


def test_a_long_prompt_does_not_hold_up_decodes() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=8)
    for name in ("a", "b"):
        driver.add(make_request(name, prompt=2, max_tokens=8))
    driver.step()
    driver.add(make_request("long", prompt=[7] * 60, max_tokens=2))
    for step in range(6):
        batch = driver.schedule()
        assert batch is not None
        assert scheduled(batch) == {0: (2 + step, 1), 1: (2 + step, 1), 2: (6 * step, 6)}
        assert batch.num_decodes == 2
        driver.apply()
    driver.run()


def test_single_tokens_lead_the_batch_whatever_they_are() -> None:
    driver = SchedulerDriver(max_num_batched_tokens=10)
    driver.add(make_request("a", prompt=9, max_tokens=4))
    driver.add(make_request("b", prompt=[5] * 8, max_tokens=4))
    batch = driver.schedule()
    assert batch is not None
    assert batch.rows.tolist() == [1, 0]  # of b one token was in the budget
    assert batch.num_scheduled_tokens.tolist() == [1, 9]
    assert batch.num_decodes == 1
    driver.apply()
    driver.run()


def test_requests_enter_while_rows_last() -> None:
    driver = SchedulerDriver(max_num_seqs=2)
    for name in "abc":
        driver.add(make_request(name, prompt=[ord(name)] * 2, max_tokens=2))
    driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (2, 1)
    driver.step()
    batch = driver.schedule()
    assert batch is not None
    assert batch.freed_rows.tolist() == [0, 1]
    assert [new.row for new in batch.new_rows] == [0]
    driver.apply()
    driver.run()


def test_the_number_of_rows_does_not_exceed_the_budget() -> None:
    driver = SchedulerDriver(max_num_seqs=4, max_num_batched_tokens=2)
    for name in "abcd":
        driver.add(make_request(name, prompt=3, max_tokens=3))
    driver.step()
    assert driver.scheduler.num_running <= 2
    driver.run()


def test_a_prefix_hit_skips_what_is_computed() -> None:
    driver = SchedulerDriver()
    first = driver.add(make_request("a", prompt=10, max_tokens=2))
    driver.run()
    second = driver.add(make_request("b", prompt=10, max_tokens=2))
    batch = driver.schedule()
    assert batch is not None
    assert scheduled(batch) == {0: (8, 2)}
    assert batch.block_indices.tolist() == [0, 1, 2]
    driver.apply()
    driver.run()
    assert first.output_token_ids == second.output_token_ids
    assert (first.num_cached_tokens, first.num_reused_blocks, first.num_new_blocks) == (0, 0, 3)
    assert (second.num_cached_tokens, second.num_reused_blocks, second.num_new_blocks) == (8, 2, 1)
    stats = driver.scheduler.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (20, 8)


def test_a_hit_continues_into_the_output_of_another_request() -> None:
    driver = SchedulerDriver()
    first = driver.add(make_request("a", prompt=6, max_tokens=8))
    driver.run()
    turn = [*range(6), *first.output_token_ids, 3, 4, 5]
    second = driver.add(make_request("b", prompt=turn, max_tokens=2))
    driver.run()
    assert second.num_cached_tokens == 12  # of 6 + 7 computed tokens


def test_without_prefix_caching_nothing_is_looked_up() -> None:
    driver = SchedulerDriver(enable_prefix_caching=False)
    for name in "ab":
        driver.add(make_request(name, prompt=10, max_tokens=2))
        driver.run()
    stats = driver.scheduler.stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits, stats.num_cached_blocks) == (0, 0, 0)


def test_a_stop_id_ends_the_request_and_is_its_last_token() -> None:
    driver = SchedulerDriver()
    output, _ = naive_output(make_request(prompt=4, max_tokens=8))
    stop = output[3]
    request = driver.add(make_request(prompt=4, max_tokens=8, stop_token_ids=(39, stop)))
    driver.run()
    assert request.output_token_ids == output[: output.index(stop) + 1]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, stop)


def test_a_stop_id_as_last_possible_token_is_a_stop() -> None:
    driver = SchedulerDriver()
    output, _ = naive_output(make_request(prompt=4, max_tokens=3))
    request = driver.add(make_request(prompt=4, max_tokens=3, stop_token_ids=(output[2],)))
    driver.run()
    assert request.finish_reason is FinishReason.STOP


def test_requests_with_many_and_with_few_stop_ids_run_together() -> None:
    driver = SchedulerDriver()
    many = driver.add(make_request("many", prompt=[1], max_tokens=20, stop_token_ids=tuple(range(38))))
    none = driver.add(make_request("none", prompt=[1], max_tokens=20))
    driver.run()
    assert many.finish_reason is FinishReason.STOP
    assert none.finish_reason is FinishReason.LENGTH


def test_stop_ids_before_min_tokens_do_not_end_the_request() -> None:
    scheduler = make_scheduler()
    request = make_request(prompt=2, max_tokens=4, min_tokens=2, stop_token_ids=(9,))
    scheduler.add_group([request], 0.0)
    for token_ids in ([9], [9]):  # a sampler that does not mask
        batch = scheduler.schedule(0.0)
        assert batch is not None
        outputs = scheduler.apply(batch, answer(batch, token_ids), 0.0)
    assert outputs.finished == [request]
    assert request.output_token_ids == [9, 9]


def test_allowed_tokens_that_are_all_forbidden_are_named() -> None:
    driver = SchedulerDriver()
    request = make_request(max_tokens=6)
    request.sampling = replace(request.sampling, allowed_token_ids=(5,))
    driver.add(request)
    driver.runner.not_finite.add("a")
    driver.run()
    assert isinstance(request.error, InvalidRequest)
    assert "forbid all of allowed_token_ids" in str(request.error)


def test_logits_that_are_not_finite_end_their_request_only() -> None:
    driver = SchedulerDriver()
    broken = driver.add(make_request("broken", prompt=9, max_tokens=6))
    healthy = driver.add(make_request("healthy", prompt=[3] * 5, max_tokens=6))
    driver.step()
    driver.runner.not_finite.add("broken")
    outputs = driver.step()
    assert outputs is not None
    assert outputs.finished == [broken]
    assert outputs.requests == [healthy]
    assert broken.finish_reason is FinishReason.ERROR
    assert isinstance(broken.error, NumericError)
    driver.runner.not_finite.clear()
    driver.run()
    assert healthy.output_token_ids == naive_output(healthy)[0]
    again = driver.add(make_request("again", prompt=9, max_tokens=6))
    driver.run()
    assert again.num_cached_tokens == 0  # nothing that the broken one computed is used again
    third = driver.add(make_request("third", prompt=9, max_tokens=6))
    driver.run()
    assert third.num_cached_tokens == 8


def test_times_are_those_of_the_calls() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = make_request(prompt=6, max_tokens=2)
    scheduler.add_group([request], 1.0)
    for now, token_ids in ((2.0, [SampledTokens.NOT_SAMPLED]), (4.0, [7]), (6.0, [8])):
        batch = scheduler.schedule(now)
        assert batch is not None
        scheduler.apply(batch, answer(batch, token_ids), now + 1)
    assert request.first_scheduled_time == 2.0
    assert request.first_token_time == 5.0
    assert request.last_token_time == 7.0


def test_logprobs_follow_their_request() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6, enable_prefix_caching=False)
    for name, length in (("a", 1), ("b", 9), ("c", 5)):
        scheduler.add_group([make_request(name, prompt=length, max_tokens=4)], 0.0)
    batch = scheduler.schedule(0.0)  # a, and a part of b
    assert batch is not None
    scheduler.apply(batch, answer(batch, [4, SampledTokens.NOT_SAMPLED]), 0.0)
    batch = scheduler.schedule(0.0)  # a, the rest of b, c
    assert batch is not None
    index = batch.rows.tolist().index(1)
    logprobs = {index: TopLogprobs(-0.5, 1, (5,), (-0.5,))}
    tokens = [SampledTokens.NOT_SAMPLED if not samples else 5 for samples in batch.samples.tolist()]
    outputs = scheduler.apply(batch, SampledTokens(batch.step_id, np.array(tokens, dtype=np.int32), logprobs), 0.0)
    assert outputs.logprobs is not None
    ((position, found),) = outputs.logprobs.items()
    assert outputs.requests[position].request_id == "b"
    assert found == logprobs[index]


def test_nothing_to_do_is_none() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule(0.0) is None
    assert not scheduler.has_unfinished


def test_a_batch_is_applied_once_in_order_and_with_its_own_answer() -> None:
    scheduler = make_scheduler(max_inflight_steps=2)
    scheduler.add_group([make_request(prompt=2, max_tokens=8)], 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first is not None and second is not None
    with pytest.raises(InternalError, match="oldest"):
        scheduler.apply(second, answer(second, [1]), 0.0)
    with pytest.raises(InternalError, match="answered"):
        scheduler.apply(first, answer(second, [1]), 0.0)
    with pytest.raises(InternalError, match="answered"):
        scheduler.apply(first, answer(first, [1, 2]), 0.0)
    with pytest.raises(InternalError, match="no token"):
        scheduler.apply(first, answer(first, [SampledTokens.NOT_SAMPLED]), 0.0)
    check_invariants(scheduler)
    scheduler.apply(first, answer(first, [1]), 0.0)
    with pytest.raises(InternalError, match="oldest"):
        scheduler.apply(first, answer(first, [1]), 0.0)
    scheduler.apply(second, answer(second, [1]), 0.0)


def test_the_same_events_make_the_same_batches() -> None:
    def batches() -> list[tuple[object, ...]]:
        driver = SchedulerDriver(num_blocks=10, block_size=2, max_num_seqs=4, max_num_batched_tokens=6)
        for number in range(8):
            driver.add(make_request(f"r{number}", prompt=[number % 3] * (3 + number), max_tokens=5))
        seen = []
        while (batch := driver.schedule()) is not None:
            columns = (
                batch.rows,
                batch.start_positions,
                batch.num_scheduled_tokens,
                batch.block_ids,
                batch.freed_rows,
            )
            seen.append(tuple(tuple(column.tolist()) for column in columns))
            driver.apply()
        return seen

    first = batches()
    assert len(first) > 10
    assert first == batches()


def test_states_of_a_request() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    first = driver.add(make_request("a", max_tokens=1))
    second = driver.add(make_request("b", max_tokens=1))
    driver.schedule()
    assert (first.state, first.row) == (RequestState.RUNNING, 0)
    assert (second.state, second.row) == (RequestState.WAITING, -1)
    driver.apply()
    assert (first.state, first.row) == (RequestState.FINISHED, -1)
    driver.run()


def test_an_id_can_be_used_again_after_the_end() -> None:
    driver = SchedulerDriver()
    for _ in range(2):
        request = make_request("a", max_tokens=2)
        driver.requests.pop("a", None)
        driver.ended.pop("a", None)
        driver.add(request)
        driver.run()
        assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("encoder_tokens", "entered"), [(5, [3, 1]), (8, [2, 2]), (9, [1, 1, 1, 1]), (40, [1, 1, 1, 1])]
)
def test_audios_that_a_step_encodes_are_within_its_budget_and_at_least_one(
    encoder_tokens: int, entered: list[int]
) -> None:
    driver = SchedulerDriver(max_num_batched_tokens=16, enable_prefix_caching=False)
    for name in "abcd":
        driver.add(make_request(name, 1, max_tokens=8, encoder_tokens=encoder_tokens))
    for count in entered:
        batch = driver.schedule()
        assert batch is not None and len(batch.new_rows) == count
        driver.apply()
