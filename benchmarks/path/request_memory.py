"""Measure the private memory of every process of a server after each round of short requests.

    python benchmarks request_memory --rounds 8 --save

The demo model and its twin answer by HTTP (`generate`, `generate_stream`, `/infer`) and gRPC, in turn, with prompts
of 1 to `--words` words. Memory that still grows in late rounds is a leak. Memory that settles
is kept by an allocator.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import Any

import httpx2

from common.serving import Address, free_ports, serving_repository
from common.study import ROOT, Study, show
from path.stream_path import SETTLE_S
from tidewheel_client import Client
from tidewheel_process.process_tree import arguments, descendants

WORDS = ("a", "tuple", "is", "the", "file", "of", "an", "index", "to", "open", "and", "close", "in", "Python")
_clients = local()


def private_mib() -> dict[str, float]:
    """Return the private memory of each server process in MiB, swap included, by role ("engine", "front end 2")."""
    found: dict[str, float] = {}
    for process in sorted(descendants(os.getpid()), key=lambda one: one.create_time()):
        if role := role_of(process.name(), " ".join(arguments(process.pid))):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            pages = re.findall(r"^(?:Private_\w+|Swap):\s+(\d+) kB", rollup, re.MULTILINE)
            name = role if role not in found else f"{role} {sum(one.startswith(role) for one in found) + 1}"
            found[name] = round(sum(map(int, pages)) / 1024, 1)
    return found


def role_of(name: str, command: str) -> str:
    if name == "tritonserver" or "--engine-dir" in command:
        return "tritonserver" if name == "tritonserver" else "engine"
    if "prompt_workers" in command:
        return "prompts"
    return "front end" if name.startswith("triton_python_b") else ""


def asker(address: Address, max_tokens: int) -> Callable[[tuple[int, str]], None]:
    """Return a function that sends one request (number, text) and waits for the answer.

    The number modulo 4 chooses the transport: gRPC, `generate`, `generate_stream` or `/infer`.
    """

    def ask(request: tuple[int, str]) -> None:
        number, text = request
        if not hasattr(_clients, "http"):
            _clients.http, _clients.grpc = httpx2.Client(verify=False), Client(address.grpc, model="demo")
        if number % 4 == 0:
            _clients.grpc.generate(text, max_tokens=max_tokens)
            return
        path = ("", "demo/generate", "demo/generate_stream", "demo_infer/infer")[number % 4]
        body: dict[str, Any] = {"text_input": text, "stream": path.endswith("stream"), "max_tokens": max_tokens}
        if path.endswith("infer"):
            given = {"text_input": text, "sampling_parameters": json.dumps({"max_tokens": max_tokens})}
            tensors = [{"name": k, "datatype": "BYTES", "shape": [1], "data": [v]} for k, v in given.items()]
            body = {"inputs": tensors}
        _clients.http.post(f"http://{address.http}/v2/models/{path}", json=body, timeout=120).raise_for_status()

    return ask


def main() -> None:
    study = Study("request_memory", __doc__)
    study.add_argument("--rounds", type=int, default=8)
    study.add_argument("--requests", type=int, default=5000, help="of a round")
    study.add_argument("--in-flight", type=int, default=8)
    study.add_argument("--max-tokens", type=int, default=4)
    study.add_argument("--words", type=int, default=24, help="at most, of a prompt")
    options = study.begin()
    chance, numbers, rows = random.Random(1), itertools.count(), []
    with (
        serving_repository(ROOT / "model_repository", "demo", ports=free_ports(4),
                           arguments=("--models", "demo,demo_infer")) as address,
        ThreadPoolExecutor(options.in_flight) as threads,
    ):  # fmt: skip
        for round_number in range(options.rounds + 1):
            rows.append({"requests": options.requests * round_number, **private_mib()})
            show(rows[-1:])
            if round_number < options.rounds:
                texts = (" ".join(chance.choices(WORDS, k=chance.randint(1, options.words)))
                         for _ in range(options.requests))  # fmt: skip
                for _ in threads.map(asker(address, options.max_tokens), zip(numbers, texts, strict=False)):
                    pass
                time.sleep(SETTLE_S)
    show(rows)
    study.save({"private_mib": rows})


if __name__ == "__main__":
    main()
