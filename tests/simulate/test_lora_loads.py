"""Adapters of a trace: read one after another, in slots that they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.simulate.simulation import simulator
from tidewheel.cli.main import main
from tidewheel.workload.trace_files import read_trace
from tidewheel.workload.traces import Trace


def adapters(count: int, num_requests: int = 400) -> Trace:
    """Return requests of `count` adapters in turn and of the base model."""
    numbers = np.arange(num_requests) % (count + 1)
    return Trace.of(
        np.arange(num_requests) * 0.05,
        np.full(num_requests, 64),
        np.full(num_requests, 32),
        loras=numbers,
        lora_names=("", *(f"a{number}" for number in range(count))),
    )


def run(trace: Trace, **settings: Any) -> dict[str, dict[str, dict[str, float]]]:
    one = simulator(trace, max_num_seqs=16, num_blocks=1024, lora_load_s=0.5, **settings)
    one.run()
    figures = one.summary()
    assert figures["finished"] == len(trace)
    parts: dict[str, dict[str, dict[str, float]]] = figures["loras"]
    return parts


def test_a_trace_file_names_adapters(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival": 0, "prompt_tokens": 4, "output_tokens": 2, **more} for more in ({}, {"lora": "sql"})]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    assert [trace.lora(index) for index in range(2)] == ["", "sql"]


def test_first_requests_wait_for_a_read_and_others_do_not() -> None:
    parts = run(adapters(4), max_loras=8)
    slowest = {name: part["ttft_s"]["p99"] for name, part in parts.items()}
    assert min(slowest.values()) == slowest[""] < 0.5 < max(slowest.values())


def test_few_slots_serve_many_adapters_alike() -> None:
    parts = run(adapters(6), max_loras=2, ageing_s=1.0)
    means = [part["ttft_s"]["mean"] for name, part in parts.items() if name]
    assert max(means) < 2.0 * min(means) + 1.0


def test_adapters_of_a_trace_need_the_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"arrival": 0, "prompt_tokens": 4, "output_tokens": 2, "lora": "sql"}
    path.write_text("\n".join(json.dumps(row | {"arrival": number}) for number in range(20)))
    assert main(["simulate", "--trace", str(path)]) != 0
    assert "set enable_lora" in capsys.readouterr().err
    assert main(["simulate", "--trace", str(path), "--set", "enable_lora=true", "--lora-load", "2"]) == 0
