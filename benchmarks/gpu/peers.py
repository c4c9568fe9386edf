"""Other engines beside Tidewheel: equal weights and requests, greedy, each in a process on an empty device.

transformers is measured if installed; a bundle brings the others (README.md).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common.work_items import WorkItem
from gpu.engine import HEADLINE, headline_work, report
from gpu.engine_steps import OFFLINE
from gpu.measurements import OURS, Measurement
from gpu.stage import Stage, logged, parser, run
from gpu.suite import FA3_FOLDER, FA3_LIBRARY, TINY, unpacked
from tidewheel.bench.worker_process import WorkerProcess

# -P keeps modules of this folder from shadowing an engine's imports.
PROGRAM = Path(__file__).parent / "offline_run.py"
BENCHMARKS = Path(__file__).parents[1]
START_S = 40.0  # besides the runs


class Peer(NamedTuple):
    name: str
    folders: tuple[str, ...] = ()  # of the bundle, for PYTHONPATH; none: installed
    repeats: int = 2
    models: tuple[str, ...] = ()  # empty: all


PEERS = (
    Peer("tidewheel"),
    Peer("vllm", ("site-vllm", "site-deps")),
    Peer("vllm-triton", ("site-vllm", "site-deps"), models=("qwen3-0.6b",)),
    Peer("transformers", repeats=1, models=("qwen3-0.6b", TINY)),
    Peer("transformers-fa3", (FA3_FOLDER,), repeats=1),
    Peer("lmdeploy", ("site-lmd", "site-deps", "site-ldeps")),
    Peer("sglang-triton", ("site-sglfix", "site-sgl", "site-deps", "site-sdeps", "site-shim")),
)


def peer_environment(peer: Peer, bundle: Path | None) -> dict[str, str] | None:
    """Return variables to add; None without the peer's bundle."""
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not peer.folders:
        return environment
    if bundle is None or not (bundle / peer.folders[0]).is_dir():
        return None
    environment["PYTHONPATH"] = os.pathsep.join(str(bundle / folder) for folder in peer.folders)
    environment["FA3_SO"] = str(bundle / FA3_LIBRARY)
    environment["SGLANG_USE_SGL_FA3_KERNEL"] = "1"
    return environment


def body(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        bundle: Path | None = None
        if stage.options.peers:
            with stage.part("bundle of peers"):
                bundle = unpacked(stage.options.peers, folder / "bundle")
        for model in stage.models:
            with stage.part(f"weights of {model}"):
                weights = _make_weights(stage, model, folder / model)
                _compare(stage, model, weights, bundle, folder)


def _make_weights(stage: Stage, model: str, folder: Path) -> Path:
    """Make weights in another process, to leave the device empty."""
    command = [
        sys.executable,
        str(BENCHMARKS),
        "random_model",
        str(folder),
        "--shape",
        model,
        "--device",
        stage.device.type,
    ]
    subprocess.run(command, check=True, timeout=max(stage.seconds_left, 1.0), stdout=subprocess.DEVNULL)
    return folder


def _compare(stage: Stage, model: str, weights: Path, bundle: Path | None, folder: Path) -> None:
    work = headline_work(stage, model)
    requests = folder / "requests.json"
    requests.write_text(json.dumps([(item.input_ids, item.num_output_tokens) for item in work]))
    answers: dict[str, dict[str, Any]] = {}
    for peer in PEERS:
        if peer.models and model not in peer.models:
            continue
        environment = peer_environment(peer, bundle)
        if environment is None:
            stage.skip(f"{peer.name} on {model}", "it needs a bundle: --peers, see benchmarks/gpu/README.md")
            continue
        with stage.part(f"{peer.name} on {model}"):
            stage.check_time(START_S)
            answers[peer.name] = _run(stage, peer, weights, requests, environment)
            _report(stage, model, peer, work, answers)


def _run(stage: Stage, peer: Peer, weights: Path, requests: Path, environment: dict[str, str]) -> dict[str, Any]:
    options = {
        "model": str(weights),
        "requests": str(requests),
        "repeats": 1 if stage.is_dry else peer.repeats,
        "device": stage.device.type,
        "max_model_len": OFFLINE["max_model_len"],
    }
    command = [sys.executable, "-P", str(PROGRAM), peer.name, json.dumps(options)]
    with (
        logged(requests.parent / f"{peer.name}.log") as log,
        WorkerProcess(peer.name, command, log, environment) as process,
    ):
        answer: dict[str, Any] = process.receive(max(stage.seconds_left - 2.0, 1.0))
        return answer


def _report(stage: Stage, model: str, peer: Peer, work: list[WorkItem], answers: dict[str, dict[str, Any]]) -> None:
    answer, ours = answers[peer.name], answers.get(OURS)
    same = None
    if ours is not None:
        same = sum(a == b for a, b in zip(ours["head"], answer["head"], strict=True))
    report(
        stage, model, f"{HEADLINE}, greedy", work, answer["seconds"], peer.name,
        load_s=answer["load_s"], of_right_length=answer["of_right_length"], requests=len(work),
        same_first_tokens_as_ours=same,
    )  # fmt: skip
    if ours is not None and peer.name != OURS:
        measured = Measurement(
            name="ours over peer",
            case=f"{model}, {HEADLINE}, greedy",
            value=statistics.median(answer["seconds"]) / statistics.median(ours["seconds"]),
            unit="x",
            samples=answer["seconds"],
            who=peer.name,
            details={"model": model},
        )
        stage.result(measured)


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--peers", type=Path, help="a tar file, or the folder that it was unpacked to")
    run("peers", body, made.parse_args())
