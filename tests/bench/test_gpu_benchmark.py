"""The programs that measure a GPU, on a CPU: dry runs of their stages, and the arithmetic behind their figures."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.work_items import headline, sharegpt
from gpu import __main__ as suite_program
from gpu import engine, kernels, latency, machine_check, offline_run, parity, peers, profile, swap, timing
from gpu.engine_steps import DecodeStep, Delivery, Timed, limit_ratio
from gpu.kernel_sweep import UnknownField, replaced
from gpu.measurements import Ceilings, Measurement, duration, throughput
from gpu.objectives import largest_differences, objectives
from gpu.parity import first_divergence
from gpu.profile import Interval, gaps, idle_fraction, read_timeline
from gpu.results_page import draw, markdown
from gpu.stage import Stage
from gpu.suite import FA3_FOLDER, FIRST, NAMES, TINY, Findings, choose
from gpu.timing import Timer
from modelled.roofline import SHAPES, decode_seconds, prefill_seconds, workload_seconds
from support.runner.recorded_graphs import RecordedAllocator
from tidewheel_kernels import launch_config
from tidewheel_kernels.switches import tried


def make_stage(out: Path, **options: Any) -> Stage:
    given = {
        "sweep": False, "goals": False, "once": False, "eager": False, "dtypes": "float32,bfloat16", "peers": None,
        "ceilings_out": None, **options,
    }  # fmt: skip
    return Stage(
        name="test", device=torch.device("cpu"), models=[TINY], is_dry=True, end=time.monotonic() + 300.0,
        ceilings=Ceilings(to_host=1e9, from_host=1e9), out=out, records=io.StringIO(),
        options=argparse.Namespace(**given),
    )  # fmt: skip


def written(stage: Stage) -> list[dict[str, Any]]:
    assert isinstance(stage.records, io.StringIO)
    return [json.loads(line) for line in stage.records.getvalue().splitlines()]


def names(records: list[dict[str, Any]]) -> set[str]:
    return {record["name"] for record in records if record["type"] == "result"}


BODIES: dict[str, tuple[Callable[[Stage], None], dict[str, Any], set[str]]] = {
    "kernels": (
        kernels.body, {},
        {"decode attention", "prefill attention", "residual RMSNorm", "invariant product", "block copy", "swap in"},
    ),
    "sweep": (kernels.body, {"sweep": True}, {"sweep decode_config", "sweep linear_config", "sweep rope_config"}),
    "engine": (engine.body, {}, {"engine throughput", "decode steps over limit", "streamed tokens"}),
    "latency": (latency.body, {}, {"decode step", "time to first token", "prefill"}),
    "swap": (swap.body, {}, {"recompute over swap", "preemption"}),
    "parity": (parity.body, {}, {"parity with transformers"}),
    "machine_check": (machine_check.body, {}, {"import"}),
    "profile": (profile.body, {}, {"idle device"}),
    "goals of kernels": (kernels.body, {"goals": True}, {"decode attention", "tiny gate-up", "tiny head"}),
    "goals of latency": (latency.body, {"goals": True}, {"decode step", "time to first token"}),
    "engine once": (engine.body, {"once": True}, {"engine throughput", "decode steps over limit"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_dry_run_of_a_stage_measures_everything_it_names(name: str, tmp_path: Path) -> None:
    body, options, expected = BODIES[name]
    stage = make_stage(tmp_path, **options)
    body(stage)
    records = written(stage)
    assert [record for record in records if record["type"] == "failed"] == []
    assert expected <= names(records)
    assert all(record["samples"] for record in records if record["type"] == "result" and record["unit"] == "ms")


def test_a_switch_without_effect_is_not_measured(tmp_path: Path) -> None:
    token = tried.set(frozenset(["flash_prompts"]))
    latency.body(stage := make_stage(tmp_path, goals=True))
    tried.reset(token)
    (record,) = written(stage)
    assert (record["type"], record["what"]) == ("skipped", "flash_prompts")
    assert "FlashAttention-3 needs" in record["reason"]


def test_parity_finds_the_tokens_of_transformers(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    parity.parity(stage, "float32")
    (record,) = [record for record in written(stage) if record["type"] == "result"]
    assert record["value"] == 2.0


def test_without_a_device_the_command_ends_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit) as end:
        suite_program.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_dry_run_is_never_saved_among_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cpu", "--out", str(suite_program.RESULTS / "gpu_cpu")])
    with pytest.raises(SystemExit):
        suite_program.main()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "qwen"], "--models qwen: choose from qwen3-0.6b, llama-3.1-8b, tiny"),
        (["--stages", "smoke,all"], "--stages all: choose from machine_check, smoke"),
        (["--seconds", "-1"], "--seconds: -1: must be a number above 0"),
        (["--kernels", "/none"], "--kernels /none: no such file"),
        (["--out", "/proc/results"], "bench-gpu: results cannot go there: [Errno 2]"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_before_any_stage(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as end:
        suite_program.main()
    assert end.value.code not in (None, 0)
    assert said in f"{end.value.code} {capsys.readouterr().err}"


def test_a_python_without_torch_is_told_so() -> None:
    program = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('gpu', run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "this Python has no torch" in done.stderr


# --- stages ------------------------------------------------------------------------------------------------------


def test_a_part_that_fails_is_recorded_and_the_next_runs(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    stage.is_dry = False  # a dry run needs no time
    with stage.part("first"):
        raise ValueError("wrong\nin two lines")
    with stage.part("second"):
        stage.check_time(1e6)
        stage.facts(reached="by mistake")
    with stage.part("third"):
        stage.facts(reached=True)
    kinds = [record["type"] for record in written(stage)]
    assert kinds == ["failed", "skipped", "facts"]
    assert "ValueError: wrong in two lines" in written(stage)[0]["error"]
    assert "Traceback" in written(stage)[0]["traceback"]


def test_a_lost_device_ends_the_stage(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    with pytest.raises(RuntimeError), stage.part("kernel"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert written(stage)[0]["type"] == "failed"


def test_the_ceilings_come_first_and_names_are_checked() -> None:
    assert [plan.name for plan in choose(["swap", "engine"], with_peers=False)] == ["ceilings", "swap", "engine"]
    assert choose([], with_peers=False) == list(FIRST)
    assert choose(["triton_tax"], with_peers=False)[1].arguments == ("--in-process",)
    assert choose(["engine", "triton_tax"], with_peers=False)[2].arguments == ()
    assert "peers" in [plan.name for plan in choose([], with_peers=True)]
    assert all(choose([name], with_peers=False) for name in NAMES)
    with pytest.raises(ValueError, match="warp"):
        choose(["warp"], with_peers=False)


def test_peers_of_a_bundle_are_found_by_their_folders(tmp_path: Path) -> None:
    flash = next(peer for peer in peers.PEERS if peer.name == "transformers-fa3")
    assert peers.peer_environment(flash, None) is None
    assert peers.peer_environment(flash, tmp_path) is None
    (tmp_path / FA3_FOLDER).mkdir()
    environment = peers.peer_environment(flash, tmp_path)
    assert environment is not None
    assert environment["PYTHONPATH"] == str(tmp_path / FA3_FOLDER)


def test_a_peer_is_warmed_up_and_timed_on_the_same_requests(tmp_path: Path) -> None:
    requests, asked = tmp_path / "requests.json", []
    requests.write_text(json.dumps([[[1, 2, 3], 40], [[4], 2]]))

    def make(options: dict[str, Any]) -> offline_run.Run:
        assert options["model"] == "folder"

        def run(work: offline_run.Work) -> list[list[int]]:
            asked.append([count for _, count in work])
            return [[7] * min(count, 39) for _, count in work]

        return run

    answer = offline_run.measure({"model": "folder", "requests": str(requests), "repeats": 2}, make)
    assert asked == [[32, 2], [40, 2], [40, 2]]
    assert (len(answer["seconds"]), answer["num_tokens"], answer["of_right_length"]) == (2, 41, 1)
    assert answer["head"] == [[7] * 8, [7, 7]]


# --- arithmetic --------------------------------------------------------------------------------------------------


def test_the_headline_workload_is_the_published_one() -> None:
    work = headline()
    assert sum(len(item.input_ids) for item in work) == 142_827
    assert sum(item.num_output_tokens for item in work) == 133_966
    assert len(sharegpt()) == 1000


@pytest.mark.parametrize(("model", "tokens_per_s"), [("qwen3-0.6b", 36_200), ("llama-3.1-8b", 13_600)])
def test_the_speed_of_light_of_the_headline_workload(model: str, tokens_per_s: float) -> None:
    lengths = [(len(item.input_ids), item.num_output_tokens) for item in headline()]
    assert 133_966 / workload_seconds(SHAPES[model], lengths, 256) == pytest.approx(tokens_per_s, rel=0.02)


def test_requests_that_do_not_run_at_once_wait() -> None:
    shape = SHAPES["qwen3-0.6b"]
    alone = prefill_seconds(shape, [100]) + decode_seconds(shape, 1, 101)
    assert workload_seconds(shape, [(100, 2)], 1) == pytest.approx(alone)
    assert workload_seconds(shape, [(100, 2)] * 3, 1) == pytest.approx(3 * alone)
    assert workload_seconds(shape, [(100, 2)] * 3, 3) < 3 * alone


def test_decode_steps_begin_when_every_request_has_its_first_token() -> None:
    deliveries = [
        Delivery(1.0, ["0.0"]),
        Delivery(2.0, ["0.0", "1.0"]),
        Delivery(3.0, ["0.0", "1.0"]),
        Delivery(4.5, ["1.0"]),
    ]
    timed = Timed(0.5, 5.0, [10, 20], deliveries)
    assert timed.decode_steps() == [DecodeStep(1.0, 2, (12 + 21) / 2), DecodeStep(1.5, 1, 22.0)]
    assert timed.first_token_seconds() == [0.5, 1.5]
    assert sorted(timed.gaps()) == [1.0, 1.0, 1.0, 1.5]


def test_a_step_at_its_limit_has_ratio_one() -> None:
    shape, device = SHAPES["llama-3.1-8b"], Ceilings()
    step = DecodeStep(decode_seconds(shape, 8, 512.0, device), 8, 512.0)
    assert limit_ratio([step, step], shape, device) == pytest.approx(1.0)


def test_idle_time_is_what_no_kernel_covers() -> None:
    window = Interval(10.0, 20.0)
    intervals = [Interval(5.0, 11.0), Interval(10.5, 12.0), Interval(14.0, 15.0), Interval(19.0, 30.0)]
    assert idle_fraction(intervals, window) == pytest.approx(0.6)
    assert gaps(intervals, window) == [2.0, 4.0]


def test_the_timeline_is_what_ran_on_the_device_without_the_ends_of_the_run() -> None:
    def event(category: str, begin: float) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": "n", "pid": 0, "tid": 7, "ts": begin, "dur": 10.0}

    trace = {"traceEvents": [event("kernel", 90.0), event("gpu_memcpy", 0.0), event("cpu_op", 50.0), {"ph": "M"}]}
    timeline = read_timeline(trace)
    assert timeline.intervals == [Interval(0.0, 10.0), Interval(90.0, 100.0)]
    assert timeline.window == Interval(10.0, 90.0)
    with pytest.raises(RuntimeError, match="no kernel"):
        read_timeline({"traceEvents": [event("cpu_op", 1.0)]})


class FakeCuda:
    """The calls that `Timer` makes of torch.cuda; a captured operation takes a millisecond when it is replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False) -> None:
        self.now, self.calls, self.captured, self.refuses = 0.0, 0, 0, refuses
        self.allocator = RecordedAllocator()
        replaced = {
            "Event": lambda enable_timing: FakeEvent(self), "CUDAGraph": lambda: FakeGraph(self),
            "Stream": lambda _device: FakeStream(), "graph_pool_handle": object,
            "empty_cache": self.allocator.empty_cache,
            "stream": lambda _: contextlib.nullcontext(), "synchronize": lambda *_: None,
            "current_stream": lambda *_: None,
            "get_device_properties": lambda _: argparse.Namespace(L2_cache_size=60 << 20),
        }  # fmt: skip
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(timing, "_wake", lambda _: None)

    def call(self) -> None:
        self.calls += 1
        self.now += 1e-6


class FakeEvent:
    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = self._device.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other.at - self.at)


class FakeGraph:
    def __init__(self, device: FakeCuda) -> None:
        self._device = device

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self._pool, self._before = pool, self._device.calls
        self._device.allocator.begin(pool)

    def capture_end(self) -> None:
        if self._device.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self._device.allocator.end(self._pool)
        self._device.captured = self._device.calls - self._before

    def replay(self) -> None:
        self._device.now += 1e-3 * self._device.captured


class FakeStream:
    def wait_stream(self, _other: object) -> None: ...


def test_calls_are_timed_in_a_graph_over_more_data_than_the_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, made = FakeCuda(monkeypatch), []

    def factory(index: int) -> Callable[[], None]:
        made.append(index)
        return fake.call

    measured = Timer(torch.device("cuda")).measure(factory, 50 << 20)
    assert made == [0, 1, 2]  # 150 MiB, over twice a cache of 60
    assert measured.in_graph
    assert fake.captured % len(made) == 0
    assert fake.captured >= len(made)
    assert measured.seconds == pytest.approx([1e-3] * len(measured.seconds))


def test_what_cannot_be_captured_is_timed_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch, refuses=True)
    with fake.allocator.installed():
        for _ in range(2):  # a capture that failed is in the way of nothing
            measured = Timer(torch.device("cuda")).measure(lambda _: fake.call, 1 << 40)
            assert not measured.in_graph
            assert measured.seconds == pytest.approx([1e-6] * len(measured.seconds))


def test_the_first_divergence_is_measured_in_spacings_of_the_dtype() -> None:
    logits = torch.tensor([[1.0, 4.0], [4.0, 4.0 - 2.0**-5], [0.0, 9.0]])
    assert first_divergence(logits, [1, 0, 1], torch.bfloat16) is None
    found = first_divergence(logits, [1, 1, 0], torch.bfloat16)
    assert found is not None
    assert found.position == 1
    assert found.spacings == pytest.approx(1.0)  # bfloat16 has 2**-5 between numbers from 4 to 8


def test_another_configuration_holds_only_while_it_is_measured() -> None:
    recorded = launch_config.row_config(1024)
    with replaced("row_config", {"num_warps": 16}):
        assert launch_config.row_config(1024) == recorded._replace(num_warps=16)
    with replaced("vocabulary_programs", {"": 7}):
        assert launch_config.vocabulary_programs(1, 8, 132) == 7
    with pytest.raises(UnknownField, match="colour"), replaced("row_config", {"colour": 1}):
        launch_config.row_config(1024)
    assert launch_config.row_config(1024) == recorded


# --- report ------------------------------------------------------------------------------------------------------


def step(batch: int, context: int, ratio: float) -> Measurement:
    details = {"model": "llama-3.1-8b", "batch": batch, "context": context, "times_limit": ratio}
    return duration(
        "decode step", f"llama-3.1-8b, batch {batch}, context {context}", [0.004], 0.0035, details=details
    )


def test_objectives_say_what_was_met_missed_and_not_measured() -> None:
    fast = throughput("decode attention", "32:8 heads, batch 128, context 2048", [1.0], 90.0, "GB/s", 100.0)
    steps = [step(8, 512, 1.1), step(128, 2048, 1.3)]
    verdicts = {one.what: one.verdict for one in objectives([fast, *steps], Ceilings())}
    assert verdicts["decode attention, batch 128, context 2k"] == "met"
    assert verdicts["8B decode steps over their limit, batch 8-128, context 512-2k"] == "MISSED"
    assert verdicts["device idle, llama-3.1-8b"] == "not measured"


def test_the_farthest_misses_come_first_beside_limit_and_estimate() -> None:
    percent = throughput("decode attention", "32:8 heads, batch 1, context 8192", [1.0], 60.0, "GB/s", 100.0)
    slow = duration(
        "decode step", "llama-3.1-8b, batch 128, context 512", [0.02], 0.005, details={"times_limit": 4.0}
    )
    farthest, second, *_ = largest_differences(objectives([percent, slow], Ceilings()))
    assert farthest.what == "decode step, llama-3.1-8b, batch 128, context 512"
    assert (farthest.limit, farthest.target) == (5.0, 6.25)
    assert farthest.estimate is not None and farthest.estimate.low < farthest.estimate.high
    assert farthest.times_apart == pytest.approx(20 / 6.25)
    assert second.times_apart > 1
    assert all(one.verdict == "MISSED" for one in (farthest, second))


def test_a_report_has_figures_failures_and_pictures(tmp_path: Path) -> None:
    figures = [
        throughput("decode attention", "batch 1", [1.0], 50.0, "GB/s", 100.0),
        throughput("engine throughput", "tiny", [2.0], 10.0, "output tokens/s", 20.0),
        step(8, 512, 1.1),
    ]
    findings = Findings(
        [{"type": "failed", "stage": "idle", "what": "trace", "error": "no\nkernel"}],
        [{"name": "engine", "seconds": 1.0, "outcome": "done"}],
    )
    result = {
        "commit": "abc", "started": "now", "command": "python -m gpu", "dry_run": False, "versions": {"torch": "2"},
        "machine": {"gpu": "H", "processor": "p", "cores": 2}, "stages": findings.stages, "records": findings.records,
        "fallback": "without CUDA graphs",
    }  # fmt: skip
    plots = draw(figures, tmp_path)
    assert plots == ["kernels.png", "decode_steps.png"]
    text = markdown(result, [("engine", figure) for figure in figures], plots, Ceilings())
    assert "| decode attention | batch 1 | tidewheel | 50 GB/s | 50.0 % | 1 |" in text
    assert "| idle | trace | no kernel |" in text
    assert "not measured" in text
    assert "what helped: without CUDA graphs" in text
    assert draw([], tmp_path / "none") == []
