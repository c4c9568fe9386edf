"""What the engine counts, as series of the server."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import msgspec
import pytest

from support.triton.fake_triton import Logger, MetricFamily
from tidewheel.adapter import metrics as module
from tidewheel.adapter.metrics import MAX_OBSERVATIONS, RENEWAL, EngineMetrics, MetricsPublisher, request_metrics
from tidewheel.engine.messages import EngineInfo, RequestStats
from tidewheel.errors import TAGS, Busy, EngineDead, InvalidRequest, Unsupported
from tidewheel.frontend.output import OutputChunk
from tidewheel.frontend.request_figures import FrontendStats, StatsRecorder
from tidewheel.metrics import TABLE
from tidewheel.request import FinishReason, Priority
from tidewheel.stats import STEP_BOUNDS, EngineStats, Histogram, LoraFigures, Objective, TenantFigures

LABELS = {"model_name": "demo", "engine": "0", "model": "demo", "version": "1"}
value = MetricFamily.value


def make_info() -> EngineInfo:
    return EngineInfo(
        pid=1, model="demo", architecture="LlamaForCausalLM", device="cpu (2 threads)", dtype="float32",
        vocab_size=64, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64, block_size=16, num_blocks=40,
        weights_bytes=1, activation_bytes=1, kv_cache_bytes=1, enable_prefix_caching=True, load_seconds=0.1,
    )  # fmt: skip


STATS = EngineStats(
    num_running=3, num_waiting=2, num_waiting_tokens=50, num_blocks=40, num_free_blocks=30, num_cached_blocks=7,
    num_steps=9, num_scheduled_tokens=99, num_prefix_queries=60, num_prefix_hits=16, num_preemptions=1,
    step_seconds=0.5, turn_wait_seconds=0.75, busy_fraction=0.25, waiting_by_class=[0, 1, 1, 0],
)  # fmt: skip


def test_metric_families() -> None:
    EngineMetrics(make_info(), LABELS).publish(STATS)
    for name, expected in {
        "vllm:num_requests_running": 3, "vllm:num_requests_waiting": 2, "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 60, "vllm:prefix_cache_hits_total": 16, "vllm:num_preemptions_total": 1,
        "tidewheel_waiting_tokens": 50, "tidewheel_kv_blocks_cached": 7, "tidewheel_engine_busy_fraction": 0.25,
        "tidewheel_turn_wait_seconds_total": 0.75,
        "tidewheel_steps_total": 9, "tidewheel_step_seconds_total": 0.5, "tidewheel_scheduled_tokens_total": 99,
    }.items():  # fmt: skip
        assert value(name, **LABELS) == expected, name
    assert [value("tidewheel_requests_waiting", **{"class": c}) for c in ("critical", "high", "normal", "low")] == [
        0, 1, 1, 0,
    ]  # fmt: skip


def test_figures_of_scheduling() -> None:
    stats = EngineStats(
        num_swap_preemptions=1, num_expired=2, num_hopeless=3, num_rate_limited=4, num_aged=5,
        num_downgraded_quota=6, num_downgraded_deadline=7, num_downgraded_objective=8,
        objectives_by_class=[4, 3, 2, 1], objectives_met_by_class=[3, 2, 1, 0], started_by_class=[1, 2, 3, 4],
        evicted_by_class=[0, 0, 5, 6], max_wait_by_class=[0.5, 1.5, 2.5, 3.5], num_shed_by_class=[0, 1, 2, 3],
        breaker_state=1, token_budget=512, max_num_seqs=17, num_predictions=8, prediction_error=9.5,
        num_host_blocks=100, num_free_host_blocks=90, num_swapped_out=11, num_swapped_in=12, num_sessions=13,
        num_paused_sessions=10, num_session_blocks=14, num_hit_queries=150, num_device_hits=15, num_host_hits=16,
        num_used_slots=24, num_taken_slots=32, num_wasted_slots=6, oldest_wait_by_class=[0.25, 0.5, 0.75, 1.0],
    )  # fmt: skip
    EngineMetrics(make_info(), LABELS).publish(stats)
    for name, expected in {
        "swap_preemptions_total": 1, "requests_expired_total": 2, "requests_hopeless_total": 3,
        "requests_rate_limited_total": 4, "requests_aged_total": 5, "breaker_state": 1, "token_budget": 512,
        "max_num_seqs": 17, "predictions_total": 8, "prediction_error_tokens": 9.5, "kv_host_blocks": 100,
        "kv_host_blocks_free": 90, "sessions": 13, "sessions_paused": 10, "session_blocks": 14,
        "kv_queried_tokens_total": 150, "kv_fragmentation": 0.25,
        "kv_slots_wasted": 6,
    }.items():  # fmt: skip
        assert value(f"tidewheel_{name}", **LABELS) == expected, name
    by_label = {
        ("requests_downgraded_total", "reason"): {"quota": 6, "deadline": 7, "objective": 8},
        ("objectives_total", "class"): {"critical": 4, "high": 3, "normal": 2, "low": 1},
        ("objectives_met_total", "class"): {"critical": 3, "high": 2, "normal": 1, "low": 0},
        ("kv_blocks_swapped_total", "direction"): {"out": 11, "in": 12},
        ("kv_hit_tokens_total", "tier"): {"device": 15, "host": 16},
        ("requests_started_total", "class"): {"critical": 1, "high": 2, "normal": 3, "low": 4},
        ("requests_evicted_total", "class"): {"critical": 0, "high": 0, "normal": 5, "low": 6},
        ("wait_max_seconds", "class"): {"critical": 0.5, "high": 1.5, "normal": 2.5, "low": 3.5},
        ("wait_oldest_seconds", "class"): {"critical": 0.25, "high": 0.5, "normal": 0.75, "low": 1.0},
        ("requests_shed_total", "class"): {"critical": 0, "high": 1, "normal": 2, "low": 3},
    }
    for (name, label), expected_values in by_label.items():
        for text, expected in expected_values.items():
            assert value(f"tidewheel_{name}", **{label: text}) == expected, (name, text)


TENANTS = {
    "acme": TenantFigures(
        num_requests=9,
        num_rejected=2,
        num_started=6,
        queue_seconds=1.5,
        num_prompt_tokens=70,
        num_output_tokens=80,
        num_objectives=5,
        num_objectives_met=4,
    ),
    "other": TenantFigures(num_requests=1),
}
LORAS = {"sql": LoraFigures(num_running=2, num_waiting=3, num_requests=9, num_prompt_tokens=70, num_output_tokens=80)}


def test_gauges_of_adapters_that_lost_their_label_are_zero() -> None:
    series = EngineMetrics(make_info(), LABELS)
    series.publish(EngineStats(loras=LORAS))
    assert value("tidewheel_lora_requests_running", lora="sql") == 2
    series.publish(EngineStats(loras={"other": LoraFigures(num_running=1)}))
    assert value("tidewheel_lora_requests_running", lora="sql") == 0
    assert value("tidewheel_lora_requests_running", lora="other") == 1
    series.clear()
    assert value("tidewheel_lora_requests_running", lora="other") == 0
    assert value("tidewheel_lora_requests_total", lora="sql") == 9


STEPS = Histogram(STEP_BOUNDS)
STEPS.observe(7, count=3)


def test_every_figure_of_the_engine_is_published() -> None:
    before = EngineStats(num_blocks=40, num_used_slots=3, num_taken_slots=32)
    for field in EngineStats.__struct_fields__:
        old = getattr(before, field)
        new = {str: "open", list: [1, 1, 1, 1], dict: TENANTS, Histogram: STEPS}.get(type(old), 7)
        new = LORAS if field == "loras" else new
        MetricFamily.values.clear()
        EngineMetrics(make_info(), LABELS).publish(before)
        published = dict(MetricFamily.values)
        MetricFamily.values.clear()
        EngineMetrics(make_info(), LABELS).publish(msgspec.structs.replace(before, **{field: new}))
        assert dict(MetricFamily.values) != published, field


def test_a_source_is_a_field_of_its_owner() -> None:
    figures = {
        "engine": EngineStats(), "tenant": TenantFigures(), "lora": LoraFigures(), "requests": FrontendStats()
    }  # fmt: skip
    for metric in TABLE:
        for field in metric.source.values() if isinstance(metric.source, dict) else filter(None, [metric.source]):
            assert hasattr(figures[metric.owner], field), metric.name


def test_figures_by_tenant() -> None:
    EngineMetrics(make_info(), LABELS).publish(EngineStats(tenants=TENANTS))
    for name, expected in {
        "requests_total": 9, "requests_rejected_total": 2, "requests_started_total": 6, "queue_seconds_total": 1.5,
        "prompt_tokens_total": 70, "generation_tokens_total": 80, "objectives_total": 5, "objectives_met_total": 4,
    }.items():  # fmt: skip
        assert value(f"tidewheel_tenant_{name}", tenant="acme", **LABELS) == expected, name
    assert value("tidewheel_tenant_requests_total", tenant="other", **LABELS) == 1


def test_every_figure_of_a_tenant_is_published() -> None:
    for field in msgspec.structs.fields(TenantFigures):
        MetricFamily.values.clear()
        tenants = {"t": TenantFigures(**{field.name: 7})}
        EngineMetrics(make_info(), LABELS).publish(EngineStats(tenants=tenants))
        assert [number for key, number in MetricFamily.values.items() if number and "_tenant_" in key[0]] == [7]


def test_figures_by_adapter() -> None:
    EngineMetrics(make_info(), LABELS).publish(EngineStats(loras=LORAS))
    for name, expected in {
        "requests_running": 2, "requests_waiting": 3, "requests_total": 9, "prompt_tokens_total": 70,
        "generation_tokens_total": 80,
    }.items():  # fmt: skip
        assert value(f"tidewheel_lora_{name}", lora="sql", **LABELS) == expected, name


def test_figures_of_tenants_go_on_where_another_front_end_stopped() -> None:
    owner, other = EngineMetrics(make_info(), LABELS), EngineMetrics(make_info(), LABELS)
    owner.publish(EngineStats(tenants=TENANTS))
    other.publish(EngineStats(tenants=TENANTS), is_ours=False)
    other.publish(EngineStats(tenants=TENANTS | {"other": TenantFigures(num_requests=4)}))
    assert value("tidewheel_tenant_requests_total", tenant="acme", **LABELS) == 9
    assert value("tidewheel_tenant_requests_total", tenant="other", **LABELS) == 4


def test_figures_of_tenants_survive_the_wire() -> None:
    sent = msgspec.msgpack.encode(EngineStats(tenants=TENANTS))
    assert msgspec.msgpack.decode(sent, type=EngineStats).tenants == TENANTS


def test_the_family_that_triton_makes_load_headers_of() -> None:
    EngineMetrics(make_info(), LABELS).publish(STATS)
    blocks = {
        kind: value("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind, model="demo", version="1")
        for kind in ("max", "used", "tokens_per")
    }
    assert blocks == {"max": 40, "used": 10, "tokens_per": 16}


def test_an_idle_engine_costs_nothing() -> None:
    metrics = EngineMetrics(make_info(), LABELS)
    metrics.publish(STATS)
    calls = MetricFamily.num_calls
    metrics.publish(STATS)
    assert MetricFamily.num_calls == calls


def test_who_takes_over_goes_on_where_the_other_stopped() -> None:
    owner, other = EngineMetrics(make_info(), LABELS), EngineMetrics(make_info(), LABELS)
    other.publish(STATS)
    MetricFamily.values.clear()
    owner.publish(STATS)
    other.publish(STATS, is_ours=False)
    other.publish(STATS)
    assert value("vllm:prefix_cache_queries_total") == 60
    assert value("vllm:num_requests_running") == 3


def last_chunk(reason: str, num_input_tokens: int, stats: RequestStats | None = None) -> OutputChunk:
    return OutputChunk(text="", finish_reason=reason, num_input_tokens=num_input_tokens, stats=stats)


def make_stats(recorder: StatsRecorder) -> StatsRecorder:
    """Two answered requests, one refused, one cancelled, one whose engine died."""
    for _ in range(5):
        recorder.received()
    recorder.tokens(1, 0.05, 7)
    recorder.tokens(1, 0.07, 5)
    recorder.tokens(2, 0.04)
    perf = RequestStats(
        arrival_ns=0, first_scheduled_ns=400_000_000, first_token_ns=900_000_000, last_token_ns=2_900_000_000,
    )  # fmt: skip
    recorder.finished(last_chunk("stop", 7, perf), 0.9, [1, 3])
    recorder.finished(last_chunk("length", 5, perf), 7.0, [4])
    recorder.finished(last_chunk("cancelled", 0), 1.0, [])
    recorder.failed(Busy("full"), had_output=False)
    recorder.failed(EngineDead("gone"), had_output=True)
    return recorder


def test_request_figures() -> None:
    recorder = make_stats(StatsRecorder(128))
    metrics = request_metrics(LABELS, recorder.snapshot())
    for error in (InvalidRequest("x"), InvalidRequest("y"), Unsupported("z")):
        recorder.received()
        recorder.failed(error, had_output=False)
    metrics.publish(recorder.snapshot())
    assert value("tidewheel_requests_received_total", **LABELS) == 8
    for reason in ("stop", "length", "cancelled"):
        assert value("vllm:request_success_total", finished_reason=reason) == 1
    for tag, number in {"TW-INPUT": 2, "TW-UNSUPPORTED": 1, "TW-BUSY": 1, "TW-DRAINING": 0}.items():
        assert value("tidewheel_requests_rejected_total", tag=tag) == number
    assert value("tidewheel_requests_failed_total", tag="TW-ENGINE-DEAD") == 1
    assert value("vllm:prompt_tokens_total", **LABELS) == 12
    assert value("vllm:generation_tokens_total", **LABELS) == 4


def test_a_series_is_opened_once_for_a_finish_reason_and_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr(module, "_keep", lambda thing: opened.append(thing) or thing)
    stats = FrontendStats()
    table = request_metrics(LABELS, stats)
    before = len(opened)
    stats.finished.update(["stop", FinishReason.LENGTH])
    table.publish(stats)
    assert len(opened) == before


def test_request_histograms() -> None:
    stats = make_stats(StatsRecorder(128)).snapshot()
    request_metrics(LABELS, stats).publish(stats)
    first, queue = "vllm:time_to_first_token_seconds", "vllm:request_queue_time_seconds"
    assert [value(f"{first}_bucket", le=edge) for edge in ("0.04", "0.06", "0.08", "2560", "+Inf")] == [0, 1, 2, 2, 2]
    assert value(f"{first}_sum", **LABELS) == pytest.approx(0.12)
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        assert value(f"{name}_count", **LABELS) == 2
        assert value(f"{name}_sum", **LABELS) == pytest.approx(0.04)
    assert value("vllm:e2e_request_latency_seconds_bucket", le="1") == 1
    assert [value(f"{queue}_bucket", le=edge) for edge in ("0.3", "0.5")] == [0, 2]
    for name, expected in {
        "request_queue_time_seconds": (2, 0.8), "request_prefill_time_seconds": (2, 1.0),
        "request_decode_time_seconds": (2, 4.0), "request_inference_time_seconds": (2, 5.0),
        "request_prompt_tokens": (2, 12), "request_generation_tokens": (3, 8), "request_params_n": (2, 3),
    }.items():  # fmt: skip
        assert (value(f"vllm:{name}_count"), value(f"vllm:{name}_sum")) == pytest.approx(expected), name
    assert [value("vllm:request_prompt_tokens_bucket", le=edge) for edge in ("2", "5", "10", "100")] == [0, 1, 2, 2]


def test_goodput_by_class() -> None:
    """A whole answer is in time if a stream just within the objective has all tokens by then."""
    recorder = StatsRecorder(128, Objective(ttft_s=1.0, tpot_s=0.1))
    for reason, seconds, num_tokens, priority in (
        ("length", 1.5, [6], Priority.HIGH),  # just within
        ("stop", 1.6, [6], Priority.HIGH),
        ("stop", 1.5, [2, 6], Priority.LOW),  # of several sequences, the longest counts
        ("cancelled", 0.1, [6], Priority.LOW),
        ("deadline", 0.1, [6], Priority.LOW),
        ("stop", 0.1, [], Priority.LOW),  # of the tokenizer
    ):
        recorder.finished(last_chunk(reason, 7), seconds, num_tokens, priority)
    metrics = request_metrics(LABELS, recorder.snapshot())
    metrics.publish(recorder.snapshot())
    for name, expected in (("answered", [0, 2, 0, 1]), ("in_time", [0, 1, 0, 1])):
        classes = ("critical", "high", "normal", "low")
        assert [value(f"tidewheel_requests_{name}_total", **{"class": one}) for one in classes] == expected


def test_every_series_with_a_tag_or_class_is_there_from_the_start() -> None:
    """Prometheus sees no increase in a series that begins above zero."""
    request_metrics(LABELS, StatsRecorder(128).snapshot())
    for tag in TAGS:
        assert value("tidewheel_requests_failed_total", tag=tag) == 0
    for priority in Priority:
        assert value("tidewheel_requests_in_time_total", **{"class": priority.name.lower()}) == 0


def test_restarts_of_the_engine() -> None:
    """Every front end sees them, and the owner publishes."""
    owner, other = EngineMetrics(make_info(), LABELS), EngineMetrics(make_info(), LABELS)
    for count in (0, 1):
        owner.restarts.advance({"": count}, is_ours=True)
        other.restarts.advance({"": count}, is_ours=False)
    assert value("tidewheel_engine_restarts_total", **LABELS) == 1
    other.restarts.advance({"": 2}, is_ours=True)
    assert value("tidewheel_engine_restarts_total", **LABELS) == 2


def test_steps_are_a_histogram() -> None:
    EngineMetrics(make_info(), LABELS).publish(EngineStats(step_tokens=STEPS))
    assert [value("vllm:iteration_tokens_total_bucket", le=edge) for edge in ("1", "8")] == [0, 3]
    assert value("vllm:iteration_tokens_total_sum", **LABELS) == 21


def test_the_next_flush_adds_what_is_new() -> None:
    recorder = make_stats(StatsRecorder(128))
    metrics = request_metrics(LABELS, recorder.snapshot())
    metrics.publish(recorder.snapshot())
    calls = MetricFamily.num_calls
    metrics.publish(recorder.snapshot())
    assert MetricFamily.num_calls == calls
    recorder.tokens(1, 0.3)
    metrics.publish(recorder.snapshot())
    assert value("vllm:inter_token_latency_seconds_count") == 3
    assert value("vllm:generation_tokens_total") == 5


def test_usage_before_the_first_block() -> None:
    EngineMetrics(make_info(), LABELS).publish(EngineStats())
    assert value("vllm:kv_cache_usage_perc") == 0


def test_the_publisher_flushes_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 3600.0)
    flushed: list[bool] = []

    def flush() -> bool:
        flushed.append(True)
        return False

    publisher = MetricsPublisher(flush)
    publisher.flush()
    assert len(flushed) == 1
    publisher.close()
    assert len(flushed) == 2


def test_the_publisher_goes_on_at_once_while_figures_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return len(waits) == 4

    answers = iter([True, True, False, False])
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 9.0)
    monkeypatch.setattr(threading, "Event", Stopped)
    monkeypatch.setattr(threading, "Thread", lambda target, **_: SimpleNamespace(start=target, join=lambda: None))
    MetricsPublisher(lambda: next(answers)).close()
    assert waits == [9.0, 0.0, 0.0, 9.0]


def test_all_steps_are_told_once_there_is_time() -> None:
    steps = Histogram(STEP_BOUNDS)
    metrics = EngineMetrics(make_info(), LABELS)
    for _ in range(10):
        steps.observe(3, 500)
        assert metrics.publish(EngineStats(step_tokens=steps))
    assert value("vllm:iteration_tokens_total_count", **LABELS) == 10 * MAX_OBSERVATIONS
    num_parts = 1
    while metrics.publish(EngineStats(step_tokens=steps), has_time=True):
        num_parts += 1
        assert num_parts < 200
    assert value("vllm:iteration_tokens_total_count", **LABELS) == pytest.approx(5000, abs=1)
    assert value("vllm:iteration_tokens_total_sum", **LABELS) == pytest.approx(15000, abs=3)


def test_a_flush_that_fails_is_said_once_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_INTERVAL_S", 0.0)
    calls, third = [], threading.Event()

    def flush() -> bool:
        calls.append(1)
        if len(calls) >= 3:
            third.set()
        raise RuntimeError("server is gone")

    publisher = MetricsPublisher(flush)
    assert third.wait(60)
    publisher.close()
    assert len([line for _, line in Logger.lines if "server is gone" in line]) == 1


def test_gauges_of_an_engine_are_cleared_and_renewed() -> None:
    """A front end that closes late may clear what its successor has sent."""
    leaving, successor = (EngineMetrics(make_info(), LABELS) for _ in range(2))
    stats = EngineStats(num_running=4, num_blocks=10)
    for publisher in (leaving, successor):
        publisher.publish(stats)
        publisher.ready.advance({"": 1})
    leaving.clear()
    assert value("vllm:num_requests_running", **LABELS) == 0
    assert value("tidewheel_engine_ready", **LABELS) == 0
    for _ in range(RENEWAL):
        successor.publish(stats)
        successor.ready.advance({"": 1})
    assert value("vllm:num_requests_running", **LABELS) == 4
    assert value("tidewheel_engine_ready", **LABELS) == 1
