"""What became of a request, and the figures of many."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from support.bench.runs import outcome
from tidewheel.bench.estimates import quantile
from tidewheel.bench.outcome import RequestOutcome, Slo, error_code
from tidewheel.bench.summary import fairness, rates, span, summarise_repeats, summarise_run

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def test_time_per_output_token_is_the_mean_gap() -> None:
    assert outcome(ttft=0.5, tpot=0.02, tokens=6).tpot == pytest.approx(0.02)
    assert outcome(tokens=1).tpot is None
    assert outcome(streamed=False, tpot=0.0).tpot is None


def test_tokens_that_came_together_share_their_gap() -> None:
    one = outcome(tokens=1)
    one.chunks = [(0.1, 1), (0.4, 3), (0.5, 1)]
    assert one.inter_token_latencies() == pytest.approx([0.1, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(
    ("one", "good", "good_at_end"),
    [
        (outcome(ttft=0.9, tpot=0.09), True, True),
        (outcome(ttft=1.1, tpot=0.01), False, True),  # late to begin, and done in time
        (outcome(ttft=0.1, tpot=0.15), False, True),  # 0.1 + 1.5 s are under 1 + 1 s
        (outcome(ttft=0.9, tpot=0.2), False, False),
        (outcome(ttft=0.1, tokens=5, wanted=6), False, False),  # cut short
        (outcome(code="TW-BUSY"), False, False),
        (outcome(ttft=1.9, tpot=0.0, streamed=False), False, True),
    ],
)
def test_what_meets_the_objective(one: RequestOutcome, good: bool, good_at_end: bool) -> None:
    assert SLO.is_met(one) is good
    assert SLO.is_met_at_end(one) is good_at_end


def test_a_stream_within_the_objective_is_within_it_at_its_end_too() -> None:
    edge = outcome(ttft=1.0, tpot=0.1, tokens=30)
    edge.last_token = 1.0 + 0.1 * 29  # without what adding up 29 gaps makes of it
    assert SLO.is_met_at_end(edge)


def test_our_tag_says_more_than_a_status() -> None:
    assert error_code("UNAVAILABLE", "[TW-BUSY retry_after_ms=250] full") == "TW-BUSY"
    assert error_code("HTTP 400", "no such thing") == "HTTP 400"


def test_rates_of_a_run() -> None:
    run = [outcome(sent=float(second), ttft=0.5, tpot=0.05, tokens=11) for second in range(9)]
    run.append(outcome(sent=9.0, ttft=3.0, tpot=0.0, tokens=11))
    run.append(outcome(sent=9.5, code="TW-BUSY", ttft=0.01))
    assert span(run) == pytest.approx(12.0)
    figures = rates(run, SLO, offered_s=10.0)
    assert figures["requests_per_s"] == pytest.approx(10 / 12)
    assert figures["output_tokens_per_s"] == pytest.approx(110 / 12)
    assert figures["goodput_per_s"] == pytest.approx(0.9)
    assert figures["slo_attainment"] == pytest.approx(9 / 11)


def test_without_a_time_of_offering_goodput_is_over_the_whole_run() -> None:
    run = [outcome(sent=float(second)) for second in range(4)]
    assert rates(run, SLO, None)["goodput_per_s"] == pytest.approx(4 / span(run))


def test_latencies_of_a_run_leave_out_errors_and_count_them() -> None:
    run = [outcome(ttft=0.1 * (index + 1)) for index in range(10)] + [outcome(code="TIMEOUT")] * 3
    summary = summarise_run(run, SLO)
    assert summary["ttft_s"]["p50"] == pytest.approx(0.5)
    assert summary["ttft_s"]["p99"] == pytest.approx(1.0)
    assert summary["errors"] == {"TIMEOUT": 3}
    assert summary["completed"] == 10
    assert summary["itl_s"]["p95"] == pytest.approx(0.01)


def test_repeats_are_pooled_for_latencies_and_averaged_for_rates() -> None:
    first = [outcome(sent=float(s), ttft=0.2) for s in range(5)]
    second = [outcome(sent=float(s), ttft=0.6) for s in range(5)]
    figures = summarise_repeats([first, second], SLO, offered_s=5.0)
    assert figures["goodput_per_s"].mean == pytest.approx(1.0)
    assert figures["goodput_per_s"].low == pytest.approx(1.0)
    p50 = figures["ttft_s"]["p50"]
    assert p50.mean == pytest.approx(quantile([0.2] * 5 + [0.6] * 5, 0.5))
    assert p50.low <= p50.mean <= p50.high
    assert figures["requests"] == 10


def test_an_answer_in_one_piece_has_no_gaps_between_tokens() -> None:
    figures = summarise_repeats([[outcome(streamed=False)]], SLO, None)
    assert math.isnan(figures["tpot_s"]["p50"].mean)
    assert math.isnan(figures["itl_s"]["p50"].mean)


def test_fairness_between_tenants_goes_by_what_they_wanted() -> None:
    fair = [outcome(tenant="big", tokens=100), outcome(tenant="small", tokens=10)]
    assert fairness(fair) == pytest.approx(1.0)
    starved = [outcome(tenant="big", tokens=100), outcome(tenant="small", code="TW-BUSY")]
    assert fairness(starved) == pytest.approx(0.5)


def test_fairness_without_tenants_goes_by_speed() -> None:
    assert fairness([outcome(tpot=0.01), outcome(tpot=0.01)]) == pytest.approx(1.0)
    assert fairness([outcome(), outcome(code="TIMEOUT")]) == pytest.approx(0.5)


def test_classes_are_summarised_apart() -> None:
    run = [outcome(ttft=0.1, priority=1), outcome(ttft=5.0, priority=4), outcome(code="TW-BUSY", priority=4)]
    classes = summarise_run(run, SLO)["classes"]
    assert classes["critical"]["slo_attainment"] == 1.0
    assert classes["low"]["requests"] == 2
    assert classes["low"]["completed"] == 1
    assert "classes" not in summarise_run([outcome()], SLO)


def test_requests_of_one_shot_models_are_summarised_apart() -> None:
    image = outcome(priority=1, tokens=1, streamed=False)
    image.offered = replace(image.offered, entry="image")
    classes = summarise_run([outcome(priority=1, tpot=0.02), image, image], SLO, offered_s=4.0)["classes"]
    assert {name: one["goodput_per_s"] for name, one in classes.items()} == {"critical": 0.25, "critical image": 0.5}
    assert classes["critical"]["itl_s"]["p99"] == pytest.approx(0.02)


def test_goodput_of_conversations_counts_up_to_the_last_turn() -> None:
    run = [outcome(sent=float(second), ttft=0.2) for second in range(21)]
    assert rates(run, SLO, offered_s=4.0)["goodput_per_s"] == pytest.approx(21 / 20.0)
    assert rates(run[:4], SLO, offered_s=4.0)["goodput_per_s"] == pytest.approx(4 / 4.0)
