"""`tidewheel bench` on real servers: our engine, Triton's own batcher, transformers, and a server that is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.onnx_file import image_classifier, speech_detector
from support.triton.serving import REPOSITORY, WEIGHTS, Server
from tidewheel.cli.main import main

pytestmark = pytest.mark.e2e


def bench(out: Path, *arguments: str) -> dict[str, Any]:
    assert main(["bench", "--out", str(out), "--model", str(WEIGHTS), "--repeats=1", "--warm-up=2", *arguments]) == 0
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def test_servers_and_peers_that_it_starts_itself(tmp_path: Path) -> None:
    targets = [
        f"--target={name}" for name in ("continuous", "static,batch_size=4", "baseline_dynamic", "transformers")
    ]
    targets.append(f"--baselines={REPOSITORY}")
    found = bench(tmp_path, *targets, "--load=closed:4", "--requests=8", "--workload=fixed", "--output=constant:8")
    runs = {run["target"]: run for run in found["stages"][0]["runs"]}
    assert set(runs) == {"continuous", "static", "baseline_dynamic", "transformers"}
    for run in runs.values():
        assert run["summary"]["errors"] == {}
        assert run["summary"]["completed"] == len(run["samples"]) >= 8
        assert run["summary"]["output_tokens"] == 8 * len(run["samples"])
    ours = runs["continuous"]
    assert ours["server"]["steps"] > 0
    assert ours["server"]["batch_size"] >= 1
    assert ours["summary"]["tpot_s"]["p50"] > 0
    baseline = runs["baseline_dynamic"]
    assert baseline["server"]["batch_size"] >= 1
    assert baseline["summary"]["tpot_s"]["p50"] is None  # an answer in one piece
    assert not (tmp_path / "work" / "models").exists()


def test_a_server_that_is_there_over_every_transport(server: Server, tmp_path: Path) -> None:
    metrics = f",metrics=http://127.0.0.1:{server.metrics_port}/metrics"
    models = f"{server.http}/v2/models"
    targets = {
        "stream": f"grpc://{server.grpc}/demo{metrics}",
        "unary": f"grpc://{server.grpc}/demo_infer",
        "sse": f"{models}/demo/generate_stream",
        "infer": f"{models}/demo_infer/infer",
    }
    arguments = [f"--target={name}={url}" for name, url in targets.items()]
    found = bench(tmp_path, *arguments, "--workload=chat", "--input=constant:8", "--output=constant:6", "--load=all",
                  "--requests=3")  # fmt: skip
    for run in found["stages"][0]["runs"]:
        assert run["summary"]["errors"] == {}, run["target"]
        assert run["summary"]["completed"] == 12
        assert run["summary"]["output_tokens"] == 72
    prompts = sorted(sample[5] for sample in found["stages"][0]["runs"][0]["samples"])
    assert prompts == sorted([8, 22, 36, 50] * 3)  # all that was said comes again


def test_a_mix_beside_plain_instances(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    models = {"image": image_classifier(size=32), "speech": speech_detector()}
    for name, content in models.items():
        (tmp_path / f"{name}.onnx").write_bytes(content)
    given = [f"--one-shot={name}={tmp_path / name}.onnx,num_threads=1" for name in models]
    targets = ["--target=continuous", "--target=plain=baseline_dynamic", f"--baselines={REPOSITORY}"]
    load = ["--workload=mix", "--load=closed:4", "--requests=24", "--input=constant:8", "--output=constant:4"]
    found = bench(tmp_path / "out", *targets, *given, *load)
    for run in found["stages"][0]["runs"]:
        assert run["summary"]["errors"] == {}, run["target"]
        assert {"critical", "normal", "low image"} <= run["summary"]["classes"].keys()
