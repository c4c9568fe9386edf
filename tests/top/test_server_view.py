"""Pages of metrics to what `tidewheel top` shows."""

from __future__ import annotations

import os

import msgspec
import pytest

from support.top.watched import READY, PagesOf, recorded, request_line, second_look, watch_of
from tidewheel.settings import MIB
from tidewheel.top import TopError, watch
from tidewheel.top.server_view import RankLine
from tidewheel.top.view_text import as_text, ordered, verdict
from tidewheel.top.watch import ELSEWHERE, NOT_OURS, WINDOW_S, RequestListing, ServerWatch, list_here
from tidewheel_client import Health
from tidewheel_client.errors import ServerUnavailable

IDS = 'engine="0",model="demo",model_name="demo",version="1"'
OTHER = IDS.replace("demo", "other")


def page(received: int = 0, running: int = 0, waiting: int = 0, more: str = "") -> str:
    return (
        f"tidewheel_requests_received_total{{{IDS}}} {received}\n"
        f"vllm:num_requests_running{{{IDS}}} {running}\nvllm:num_requests_waiting{{{IDS}}} {waiting}\n{more}"
    )


def counted(name: str, value: float, **labels: str) -> str:
    own = "".join(f',{label}="{text}"' for label, text in labels.items())
    return f"{name}{{{IDS}{own}}} {value}\n"


def test_rates_are_growth_over_time() -> None:
    view = second_look(page(100), page(130), seconds=5.0)
    assert view.traffic.received_rate == pytest.approx(6)


def test_a_single_look_has_no_rates() -> None:
    view = second_look(page(100))
    assert view.traffic.received_rate is None
    assert view.traffic.running == 0


def test_a_counter_that_begins_anew_counts_from_nothing() -> None:
    assert second_look(page(100), page(20), seconds=10.0).traffic.received_rate == pytest.approx(2)


def test_rates_are_those_of_the_window() -> None:
    looks = [page(1000), *(page(1000) for _ in range(3)), page(1050)]
    assert second_look(*looks, seconds=WINDOW_S).traffic.received_rate == pytest.approx(50 / WINDOW_S)


def histogram(*counts: int) -> str:
    bounds = ("0.1", "0.2", "0.4", "+Inf")
    name = "vllm:time_to_first_token_seconds_bucket"
    return "".join(counted(name, count, le=bound) for bound, count in zip(bounds, counts, strict=True))


@pytest.mark.parametrize(
    ("before", "after", "median", "high"),
    [
        ((0, 0, 0, 0), (10, 10, 10, 10), 0.05, 0.095),
        ((10, 10, 10, 10), (10, 20, 20, 20), 0.15, 0.195),  # what was before does not count
        ((0, 0, 0, 0), (5, 10, 10, 10), 0.1, 0.19),
        ((0, 0, 0, 0), (0, 0, 0, 4), 0.4, 0.4),  # beyond all bounds
        ((9, 9, 9, 9), (9, 9, 9, 9), None, None),
        ((9, 9, 9, 9), (2, 2, 2, 2), 0.05, 0.095),  # of another engine
    ],
)
def test_quantiles(before: tuple[int, ...], after: tuple[int, ...], median: float | None, high: float | None) -> None:
    one = second_look(page(more=histogram(*before)), page(more=histogram(*after))).traffic
    assert one.first_token_p50_s == (None if median is None else pytest.approx(median))
    assert one.first_token_p95_s == (None if high is None else pytest.approx(high))


def test_sums_over_models_or_one() -> None:
    both = page(10) + page(7).replace(IDS, OTHER)
    after = page(30) + page(17).replace(IDS, OTHER)
    assert second_look(both, after).traffic.received_rate == pytest.approx(3)
    assert second_look(both, after, model="demo").traffic.received_rate == pytest.approx(2)
    assert second_look(both, after).models == ["demo", "other"]
    assert second_look(both, after, model="other").models == ["other"]


def test_errors_have_their_tags() -> None:
    before = counted("tidewheel_requests_rejected_total", 4, tag="TW-BUSY") + counted(
        "tidewheel_requests_failed_total", 0, tag="TW-NUMERIC"
    )
    after = before.replace(" 4\n", " 24\n") + counted("tidewheel_requests_failed_total", 2, tag="TW-ENGINE-DEAD")
    busy, dead = second_look(page(more=before), page(more=after)).errors
    assert (busy.tag, busy.refused, busy.refused_rate, busy.failed) == ("TW-BUSY", 24, pytest.approx(2), 0)
    assert (dead.tag, dead.failed, dead.failed_rate, dead.refused) == ("TW-ENGINE-DEAD", 2, pytest.approx(0.2), 0)


def rejected(tag: str, count: float) -> str:
    return counted("tidewheel_requests_rejected_total", count, tag=tag)


def limited(refused: int, by_rates: int) -> str:
    names = ("tidewheel_tenant_requests_total", "tidewheel_tenant_requests_rejected_total")
    of_tenant = "".join(counted(name, refused, tenant="acme") for name in names)
    return rejected("TW-BUSY", refused) + counted("tidewheel_requests_rate_limited_total", by_rates) + of_tenant


def failed(tag: str, count: float) -> str:
    return counted("tidewheel_requests_failed_total", count, tag=tag)


def oldest(seconds: float) -> str:
    return counted("tidewheel_wait_oldest_seconds", seconds, **{"class": "high"})


def goodput(answered: int, in_time: int) -> str:
    labels = {"class": "normal"}
    return counted("tidewheel_requests_answered_total", answered, **labels) + counted(
        "tidewheel_requests_in_time_total", in_time, **labels
    )


BLOCKS = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="%s",model="demo",version="1"} %d\n'
STEPS = counted("tidewheel_steps_total", 0) + counted("tidewheel_step_seconds_total", 0)
LATER = counted("tidewheel_steps_total", 100) + counted("tidewheel_step_seconds_total", 2)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (page(more=rejected("TW-BUSY", 0)), page(0, 16, 30, rejected("TW-BUSY", 30)), "OVERLOADED: refuses TW-BUSY"),
        (page(more=limited(0, 0)), page(0, 3, 0, limited(30, 30)), "OVER ITS RATE: acme has 3.00/s refused"),
        (page(more=limited(0, 0)), page(0, 3, 0, limited(40, 30)), "OVERLOADED: refuses TW-BUSY"),
        (page(more=rejected("TW-KV-FULL", 0)), page(0, 2, 9, rejected("TW-KV-FULL", 30)), "OVERLOADED: refuses"),
        (page(more=rejected("TW-INPUT", 0)), page(0, 1, 0, rejected("TW-INPUT", 9)), "SERVING: no queue"),
        (page(), page(0, 2, 9, BLOCKS % ("used", 97) + BLOCKS % ("max", 100)), "KV CACHE FULL: 97 % in use; 9 wait"),
        (page(), page(0, 2, 9, BLOCKS % ("used", 90) + BLOCKS % ("max", 100)), "QUEUEING: 9 wait, 2 run"),
        (page(more=STEPS), page(0, 3, 0, LATER), "SERVING: no queue; a step takes 20 ms"),
        (page(more=failed("TW-ENGINE-DEAD", 0)), page(0, 3, 0, failed("TW-ENGINE-DEAD", 5)), "FAILING: TW-ENGINE"),
        (page(more=failed("TW-CANCELLED", 0)), page(0, 3, 0, failed("TW-CANCELLED", 5)), "SERVING"),
        (page(more=STEPS), page(0, 3, 1, LATER + oldest(0.03)), "SERVING: no queue"),  # it waits for a step to end
        (page(more=STEPS), page(0, 3, 1, LATER + oldest(0.05)), "QUEUEING: 1 wait, the oldest for 50 ms"),
        (page(more=STEPS + goodput(0, 0)), page(0, 3, 0, LATER + goodput(10, 8)), "SLOW: 80 % of the answers"),
        (page(more=STEPS + goodput(0, 0)), page(0, 3, 0, LATER + goodput(10, 9)), "SERVING"),
        (page(5), page(5), "IDLE"),
    ],
)  # fmt: skip
def test_the_verdict_tells_an_overload_from_a_slow_model(before: str, after: str, words: str) -> None:
    assert second_look(before, after).summary.startswith(words)


def test_a_server_that_is_not_ready() -> None:
    pages = PagesOf([page(0, 1)], Health(False, "stopped", "demo: the engine was killed"))
    view = watch_of(pages).look()
    assert view.summary == "NOT READY: demo: the engine was killed"
    assert (view.is_ready, view.state) == (False, "stopped")


def test_a_server_without_a_page_of_readiness() -> None:
    view = watch_of(PagesOf([page(0, 1)], ServerUnavailable("no server answers at x"))).look()
    assert (view.is_ready, view.reason) == (None, "no server answers at x")
    assert view.summary.startswith("SERVING")


def test_running_requests_by_class() -> None:
    requests = [
        request_line(1, priority="high"),
        request_line(2, priority="high", state="waiting"),
        request_line(3, priority="low"),
    ]
    counts = {one.name: one.running for one in second_look(page(), requests=requests).classes}
    assert counts == {"critical": 0, "high": 1, "normal": 0, "low": 1}


@pytest.mark.parametrize(
    ("order", "numbers"),
    [
        ("slowest first", [3, 2, 1]),
        ("fewest tokens/s first", [3, 1, 2]),
        ("most tokens first", [2, 3, 1]),
        ("longest wait first", [1, 3, 2]),
        ("by tenant", [2, 3, 1]),
        ("by class", [1, 3, 2]),
    ],
)
def test_orders(order: str, numbers: list[int]) -> None:
    requests = [
        request_line(1, priority="critical", tenant="z", tokens_rate=5.0, waited_s=9.0, num_output_tokens=1),
        request_line(2, priority="low", tenant="a", tokens_rate=7.0, waited_s=0.0, num_output_tokens=400),
        request_line(3, priority="high", tenant="b", tokens_rate=None, waited_s=1.0, num_output_tokens=20),
    ]
    view = second_look(page(), requests=requests)
    assert [one.number for one in ordered(view, order)] == numbers


def test_a_recorded_overload_as_text_and_json() -> None:
    requests = [request_line(1), request_line(2, request_id="evil\x1b[2J", tenant="")]
    view = second_look(*recorded(), requests=requests)
    assert view.summary.startswith("OVERLOADED: refuses TW-BUSY")
    text = as_text(view)
    for words in ("demo, demo_infer", "TW-BUSY", "critical", "acme", "globex", "KV cache", "id-1", r"evil\x1b[2J"):
        assert words in text
    assert "\x1b" not in text
    read = msgspec.json.decode(msgspec.json.encode(view))
    assert read["errors"][0]["tag"] == "TW-BUSY"
    assert {one["name"] for one in read["tenants"]} == {"acme", "globex", "initech", "other"}
    assert read["traffic"]["running"] == 16
    assert 0 < read["cache"]["use"] < 1


def adapter(name: str, tokens: float, running: float = 0) -> str:
    figures = {
        "requests_running": running,
        "requests_waiting": 2,
        "requests_total": 7,
        "generation_tokens_total": tokens,
    }
    return "".join(counted(f"tidewheel_lora_{figure}", value, lora=name) for figure, value in figures.items())


def test_adapters() -> None:
    before = page(more=adapter("sql", 0) + adapter(r"b\\x1b", 5))
    view = second_look(before, page(more=adapter("sql", 400, running=3) + adapter(r"b\\x1b", 5)), seconds=10.0)
    assert [one.name for one in view.loras] == ["sql", r"b\x1b"]
    first = view.loras[0]
    assert (first.running, first.waiting, first.output_tokens_rate, first.output_tokens) == (3, 2, 40, 400)
    assert first.prompt_tokens_rate is None
    (line,) = (line.split() for line in as_text(view).splitlines() if line.split()[:1] == ["sql"])
    assert line[1:3] == ["3", "2"]
    many = second_look(page(more="".join(adapter(f"a{number:02}", number) for number in range(33))))
    text = as_text(many)
    assert "adapters, 25 more not shown" in text
    assert "a32" in text
    assert "a24" not in text
    assert "adapters" not in as_text(second_look(page()))


def drafts(steps: int, drafted: int, accepted: int) -> str:
    counts = {"drafts": steps, "draft_tokens": drafted, "accepted_tokens": accepted}
    return page(more="".join(counted(f"vllm:spec_decode_num_{name}_total", n) for name, n in counts.items()))


def test_drafts() -> None:
    view = second_look(drafts(10, 80, 8), drafts(30, 180, 58))
    assert (view.steps.accepted_drafts, view.steps.accepted_per_step) == (0.5, 2.5)
    assert "50 %, 2.50 a step" in as_text(view)
    assert "drafts" not in as_text(second_look(drafts(0, 0, 0), drafts(0, 0, 0)))


@pytest.mark.parametrize(
    ("text", "model", "words"),
    [
        ("# nothing\n", "", "no figures of tidewheel.*REPORT_CUSTOM_METRICS"),
        ('nv_inference_count{model="x",version="1"} 1\n', "", "no figures of tidewheel"),
        (page(), "demi", "model 'demi' has no figures on .*those with figures are demo"),
    ],
)
def test_pages_without_figures(text: str, model: str, words: str) -> None:
    with pytest.raises(TopError, match=words):
        second_look(text, model=model)


def test_requests_of_other_machines_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_here("http://gpu1:8002/metrics", "").note == ELSEWHERE
    monkeypatch.setattr(watch, "current_engines_of", lambda _: [])
    assert list_here("http://127.0.0.1:8002/metrics", "") == RequestListing(None, 0, NOT_OURS)


def test_ranks_have_their_device_memory_and_use_of_cores() -> None:
    ranks = (
        RankLine(model="demo", rank=0, device="cuda:0", pid=os.getpid()),
        RankLine(model="demo", rank=1, device="cuda:1", pid=1 << 22),  # ended
    )
    view = second_look(page(), page(), ranks=ranks)
    first, second = view.ranks
    assert first.memory_bytes is not None and first.memory_bytes > MIB and first.busy is not None
    assert (second.memory_bytes, second.busy) == (None, None)
    lines = as_text(view).splitlines()
    table = lines[lines.index("2 ranks") + 1 :]
    assert table[0].split() == ["model", "rank", "device", "host", "memory", "CPU", "process"]
    assert table[2].split() == ["demo", "1", "cuda:1", "-", "-", str(1 << 22)]
    assert "ranks" not in as_text(second_look(page()))


def test_without_a_list_no_class_has_a_count() -> None:
    view = second_look(page())
    view.classes[0].running = None
    view.is_ready = READY.is_ready
    assert verdict(view).startswith("IDLE")
    assert "critical  -" in as_text(view)


def test_what_shows_a_watch_shows_no_key() -> None:
    made = ServerWatch(PagesOf([page()]), gateway_url="http://gateway/metrics", api_key="a key")
    assert "a key" not in repr(made)
