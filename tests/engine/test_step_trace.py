"""A recording of a real engine as a trace: what Perfetto needs of Chrome's format, and what happened."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.models.tiny_models import llama, save
from tidewheel import LLM, SamplingParams
from tidewheel.cli.main import main
from tidewheel.simulate import step_trace
from tidewheel.simulate.replay import Recording

NUM_REQUESTS, NUM_TOKENS = 12, 40


@pytest.fixture(scope="module", params=[False, True], ids=["one step at once", "one step ahead"])
def recording(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Prompts that share prefixes, in a cache so small that some are preempted."""
    folder, target = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("recordings")
    save(llama, folder)
    rng = np.random.default_rng(0)
    prompts = [{"input_ids": [7] * 20 + rng.integers(3, 40, 12).tolist()} for _ in range(NUM_REQUESTS)]
    settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 12, "num_threads": 1, "max_model_len": 128}
    settings |= {"async_scheduling": request.param, "admit_by_growth": False}
    with LLM(folder, skip_tokenizer_init=True, record=str(target), **settings) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, seed=1, ignore_eos=True), use_tqdm=False)
        assert llm.stats().num_preemptions > 0
    (path,) = target.glob("*.jsonl")
    return path


@pytest.fixture(scope="module")
def trace(recording: Path) -> dict[str, Any]:
    assert main(["trace", str(recording)]) == 0
    content: dict[str, Any] = json.loads(recording.with_suffix(".trace.json").read_text())
    return content


@pytest.fixture(scope="module")
def events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = trace["traceEvents"]
    return found


def slices(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"].startswith(name)]


def test_every_event_has_the_fields_of_its_kind(trace: dict[str, Any], events: list[dict[str, Any]]) -> None:
    assert trace.keys() == {"displayTimeUnit", "otherData", "traceEvents"} and trace["displayTimeUnit"] == "ms"
    needed = {"M": {"args"}, "X": {"dur"}, "C": {"args"}, "b": {"id", "cat"}, "e": {"id", "cat"}, "i": {"s"}}
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} | needed[event["ph"]] <= event.keys(), event
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0 and event.get("dur", 0) >= 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
    assert all(isinstance(value, int) for e in events if e["ph"] == "C" for value in e["args"].values())
    assert Counter(e["ph"] for e in events)["M"] == 3


def test_events_are_in_order_and_slices_of_a_thread_do_not_overlap(events: list[dict[str, Any]]) -> None:
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    ends: dict[int, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= ends[event["tid"]] - 0.002, event  # rounded to nanoseconds
            ends[event["tid"]] = event["ts"] + event["dur"]


def test_phases_of_requests_balance(events: list[dict[str, Any]]) -> None:
    stacks: dict[str, list[str]] = defaultdict(list)
    phases: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] == "b":
            stacks[event["id"]].append(event["name"])
            phases[event["id"]].append(event["name"])
        elif event["ph"] == "e":
            assert stacks[event["id"]].pop() == event["name"]
    assert len(stacks) == NUM_REQUESTS and not any(stacks.values())
    for _, *names in phases.values():
        assert names[:2] == ["queue", "prefill"] and names[-1] == "decode"
    assert any("preempted" in names for names in phases.values())
    ended = [event["args"] for event in events if event["ph"] == "e" and "args" in event]
    assert {(args["end"], args["output tokens"]) for args in ended} == {("length", NUM_TOKENS)}
    assert sum(args["preemptions"] for args in ended) == sum(names.count("preempted") for names in phases.values())


def test_steps_have_rows_tokens_and_times(events: list[dict[str, Any]], recording: Path) -> None:
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == step_trace.STEPS]
    assert {step["name"] for step in steps} >= {"prompts", "decodes"}
    args = [step["args"] for step in steps]
    assert [one["step"] for one in args] == list(range(len(steps)))
    assert len(slices(events, "plan")) == len(slices(events, "apply")) == len(steps)
    assert all(one["tokens"] == one["decode tokens"] + one["prompt tokens"] > 0 for one in args)
    # The last token of a request is never fed back, and preempted ones are computed again.
    assert sum(one["decode tokens"] for one in args) >= NUM_REQUESTS * (NUM_TOKENS - 1) - 3 * NUM_REQUESTS
    for step in steps:
        assert step["args"]["run ms"] == pytest.approx(step["dur"] * 1e-3, abs=2e-3)
        assert step["args"]["launch"] == "eager" and step["args"]["plan ms"] > 0 and step["args"]["apply ms"] > 0
    assert step_trace.trace(Recording(recording))[1].num_steps == len(steps)


def test_counters_follow_requests_and_blocks(events: list[dict[str, Any]]) -> None:
    by_name = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            by_name[event["name"]].append(event["args"])
    assert by_name.keys() == {"requests", "KV blocks", "tokens of a step"}
    assert max(one["running"] for one in by_name["requests"]) > 1
    assert max(one["waiting"] for one in by_name["requests"]) > 1
    assert max(one["used"] for one in by_name["KV blocks"]) == 12
    assert by_name["requests"][-1] == {"running": 0, "waiting": 0} and by_name["KV blocks"][-1]["used"] == 0


def test_a_recording_that_was_cut_off_still_balances(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = recording.read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"".join(lines[: len(lines) // 2]) + b'["sched')
    assert main(["trace", str(cut), "--out", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "(the recording was cut off): open " in printed and "out.json at https://ui.perfetto.dev" in printed
    found = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    kinds = Counter(event["ph"] for event in found)
    assert kinds["b"] == kinds["e"] > 0
    assert any(event.get("args", {}).get("end") == "the recording ends" for event in found)


def test_what_is_no_recording_or_cannot_be_written_is_said_in_a_line(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    for arguments, code, says in (
        ([str(other)], 1, "other.jsonl: line 1 of the recording cannot be read"),
        ([str(tmp_path / "absent")], 1, "cannot read the recording"),
        ([str(recording), "--out", str(tmp_path / "no" / "out")], 2, "cannot be written: No such file"),
        ([str(recording), "--out", str(recording)], 2, "it is the recording itself"),
    ):
        assert main(["trace", *arguments]) == code
        assert says in capsys.readouterr().err
