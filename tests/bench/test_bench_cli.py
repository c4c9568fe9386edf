"""`tidewheel bench` against servers without models: bad input, results, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.bench.servers import BenchTriton, bench_triton, count_up
from support.triton.grpc_triton import Answer, Asked
from tidewheel.bench.outcome import UNANSWERED
from tidewheel.cli.main import main


@pytest.fixture
def triton() -> Iterator[BenchTriton]:
    with bench_triton() as fake:
        yield fake


def bench(out: Path, *arguments: str) -> int:
    return main(["bench", "--out", str(out), "--warm-up", "2", *arguments])


def document(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def test_a_measurement_from_start_to_report(
    triton: BenchTriton, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "recorded" / "figures.json"
    record.parent.mkdir()
    targets = [
        f"--target=a=grpc://127.0.0.1:{triton.port}/demo",
        f"--target=b=grpc://127.0.0.1:{triton.port}/baseline",
    ]
    loads = ["--load=closed:2", "--load=all"]
    code = bench(tmp_path, *targets, *loads, "--requests=6", "--repeats=2", f"--record={record}")
    assert code == 0
    found = document(tmp_path)
    assert '"samples"' not in record.read_text()
    figures, recorded = (one["stages"][0]["figures"] for one in (found, json.loads(record.read_text())))
    assert [one["requests"] for one in recorded] == [one["requests"] for one in figures]
    assert found["commit"]
    assert found["machine"]["cores"] >= 1
    assert found["vllm_cpu_ratio"] is None
    assert "vllm=PYTHON" in found["vllm_cpu_ratio_reason"]
    (stage,) = found["stages"]
    assert [run["target"] for run in stage["runs"]] == ["a", "b", "b", "a", "b", "a", "a", "b"]
    assert all(run["summary"]["completed"] == len(run["samples"]) >= 6 for run in stage["runs"])
    output = capsys.readouterr().out
    assert "goodput" in output
    assert str(tmp_path / "report.html") in output
    for name in ("report.html", "runs.jsonl", "run.png", "recorded/figures_run.webp"):
        assert (tmp_path / name).stat().st_size > 0


def test_the_same_seed_sends_the_same_requests(triton: BenchTriton, tmp_path: Path) -> None:
    target = f"--target=grpc://127.0.0.1:{triton.port}/demo"
    sent = []
    for _ in range(2):
        triton.asked.clear()
        assert bench(tmp_path, target, "--load=closed:1", "--requests=5", "--repeats=1", "--seed=3") == 0
        sent.append([asked.message.SerializeToString() for asked in triton.asked[2:]])  # without those that warm up
    assert sent[0] == sent[1]
    assert len(sent[0]) == 5


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--target=grpc://127.0.0.1:1/demo"], "no server answers at 127.0.0.1:1"),
        (["--target=nonsense"], "neither a URL nor one of"),
        (["--load=poisson:0"], "must be above 0"),
        (["--load=poisson:50000", "--seconds=1000"], "50,000,000 requests"),
        (["--load=sometimes:3"], "write closed:N"),
        (["--workload=trace:{folder}/none.csv"], "cannot read the trace"),
        (["--workload=trace:{folder}/bad.csv"], "bad.csv, line 3: GeneratedTokens is 'x'"),
        (["--load=trace"], "go together"),
        (["--workload=nothing"], "choose one of fixed"),
        (["--workload=mix"], "needs --one-shot image=FILE and --one-shot speech=FILE"),
        (["--one-shot=image={folder}/none.onnx"], "none.onnx': write NAME=MODEL"),
        (["--suite=compare", "--load=closed:1"], "finds its loads by itself"),
        (["--suite=compare", "--target=static"], "needs a baseline"),
        (["--model={folder}"], "no folder with a config.json, and continuous needs one"),
        (["--target=vllm=/no/python"], "no python at"),
        (["--set=max_num_seqs=0"], "max_num_seqs is 0"),
        (["--set=max_nun_seqs=4"], "did you mean 'max_num_seqs'"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    (tmp_path / "bad.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,2\n2023-11-16 18:17:04,1,x\n"
    )
    assert bench(tmp_path / "out", *(argument.format(folder=tmp_path) for argument in arguments)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("starting ")]
    assert len(errors) == 1
    assert errors[0].startswith("tidewheel: error: ")
    assert reason in errors[0]


def test_a_model_that_is_not_ready(triton: BenchTriton, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    triton.ready = False
    assert bench(tmp_path, f"--target=grpc://127.0.0.1:{triton.port}/demo") == 2
    assert "is not ready: wait until it is loaded" in capsys.readouterr().err


def test_a_target_that_refuses_everything(
    triton: BenchTriton, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(asked: Asked) -> Answer:
        raise ValueError("no")
        yield

    triton.answer = refuse
    assert bench(tmp_path, f"--target=x=grpc://127.0.0.1:{triton.port}/demo") == 2
    assert "target x answers no request" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    hung, end = threading.Event(), threading.Event()

    def hang_on_the_fifth(asked: Asked) -> Answer:
        if len(fake.asked) >= 5:
            hung.set()
            end.wait()
        yield from count_up(asked)

    with bench_triton(hang_on_the_fifth) as fake:
        command = [sys.executable, "-m", "tidewheel.cli.main", "bench", "--out", str(tmp_path), "--warm-up", "0"]
        command += [f"--target=grpc://127.0.0.1:{fake.port}/demo", "--load=closed:1", "--requests=3", "--repeats=4"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert hung.wait(120)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            end.set()
            process.kill()
    assert process.returncode == 130, errors
    assert "keeping what was measured" in errors
    assert "Traceback" not in errors
    first, second = document(tmp_path)["stages"][0]["runs"]
    assert (first["interrupted"], first["summary"]["completed"]) == (False, 3)
    assert (second["interrupted"], second["summary"]["completed"]) == (True, 1)
    assert second["summary"]["errors"] == {UNANSWERED: 1}
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 2
    assert "Cut short" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("option", "companion"),
    [
        ("--set=max_num_seqs=4", "a target of ours"),
        ("--dtype=bfloat16", "served here"),
        ("--baselines=elsewhere", "baseline_"),
        ("--budget-s=5", "--suite compare"),
        ("--offline-model=elsewhere", "--suite compare"),
        ("--offline-dtype=float32", "--suite compare"),
        ("--repeats=2 --suite=compare", "another suite"),
        ("--ttft=1 --suite=compare", "--tpot"),
        ("--tpot=1 --suite=compare", "--ttft"),
    ],
)
def test_an_option_that_counts_for_no_target_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, companion: str
) -> None:
    assert bench(tmp_path, "--target=a=grpc://127.0.0.1:9/demo", *option.split()) == 2
    error = capsys.readouterr().err
    assert option.partition("=")[0] in error and companion in error and "count for nothing" in error
