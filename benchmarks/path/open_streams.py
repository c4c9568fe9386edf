"""Private memory of each process with 10,000 gRPC streams open, which wait for 16 others.

    python benchmarks open_streams --save

Engine process, front end and server are real, the device is a formula (`modelled/engine.py`).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from common.random_model import without_weights
from common.serving import Address, free_ports, metric, served
from common.stream_readers import Asked, GrpcReader
from common.study import Study, show
from modelled.engine import modelled
from modelled.roofline import SHAPES
from path.stream_path import processes

NUM_RUNNING = 16
STREAMS_OF_A_CONNECTION = 64
NUM_TOKENS = 4000
STEP_S = 0.1
AT_ONCE = 1000  # below what may wait for the tokenizer
LIMIT_S = 120.0
SETTINGS = {"max_num_seqs": NUM_RUNNING, "max_waiting_tokens": 1 << 30, "default_max_tokens": "context"}
OURS = ("engine", "front_end")


def private_bytes(pids: Mapping[str, list[int]]) -> dict[str, int]:
    return {
        name: sum(psutil.Process(pid).memory_full_info().uss for pid in of_name) for name, of_name in pids.items()
    }


def wait_for(address: Address, num_open: int) -> None:
    end = time.monotonic() + LIMIT_S
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while sum(metric(address.metrics, name) for name in names) < num_open:
        if time.monotonic() > end:
            raise RuntimeError(f"not {num_open} requests are open after {LIMIT_S:g} s")
        time.sleep(0.1)


def measure(address: Address, num_streams: int) -> dict[str, dict[str, float]]:
    asked = Asked(address.grpc, address.model, NUM_TOKENS)
    readers = [GrpcReader(asked, NUM_RUNNING)]
    wait_for(address, NUM_RUNNING)
    before = private_bytes(processes())
    for first in range(0, num_streams, AT_ONCE):
        count = min(AT_ONCE, num_streams - first)
        readers += [
            GrpcReader(asked, min(STREAMS_OF_A_CONNECTION, count - opened))
            for opened in range(0, count, STREAMS_OF_A_CONNECTION)
        ]
        wait_for(address, NUM_RUNNING + first + count)
    after = private_bytes(processes())
    return {
        name: {
            "before_mib": round(before[name] / 2**20, 1),
            "after_mib": round(after[name] / 2**20, 1),
            "kb_per_stream": round((after[name] - before[name]) / num_streams / 1e3, 2),
        }
        for name in (*OURS, "server")
    }


def main() -> None:
    study = Study("open_streams", __doc__, "tritonclient", "nvidia-pytriton")
    study.add_argument("--streams", type=int, default=10_000)
    options = study.begin()
    os.environ |= modelled(STEP_S)
    settings = {**SETTINGS, "max_waiting_requests": options.streams + NUM_RUNNING}
    with tempfile.TemporaryDirectory() as folder:
        model = without_weights(Path(folder) / "modelled", replace(SHAPES["tiny"], vocab=64))
        with served(model, settings, ports=free_ports(4), arguments=("--allow-faults",)) as address:
            found = measure(address, options.streams)
    show({"process": name, **figures} for name, figures in found.items())
    ours = round(sum(found[name]["kb_per_stream"] for name in OURS), 2)
    print(f"our processes: {ours} kB a stream")
    study.save({"streams": options.streams, "our_kb_per_stream": ours, "processes": found})


if __name__ == "__main__":
    main()
