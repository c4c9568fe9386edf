"""Requests a second with one short answer each, through a twin: `/infer` and unary gRPC, and CPU time by process.

    python benchmarks short_requests --save

Engine process, front ends and server are real, the device is a formula whose steps take `--step-ms`, 0 for none
(`modelled/engine.py`). The client is a process of sockets (`stream_readers.py`), in a closed loop.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.random_model import without_weights
from common.serving import Address, free_ports, serving_repository
from common.stream_readers import Asked
from common.study import Study, in_turns, show, summary
from modelled.engine import modelled
from modelled.roofline import SHAPES
from path.stream_path import PROCESSES, SETTLE_S, START_LIMIT_S, Case, cpu_seconds, processes, reading

TRANSPORTS = ("infer", "grpc")
TWIN = "modelled_infer"
MODEL_CONFIG = """backend: "tidewheel"
parameters { key: "model" value { string_value: "weights" } }
parameters { key: "max_num_seqs" value { string_value: "256" } }
"""
TWIN_CONFIG = """backend: "tidewheel"
model_transaction_policy { decoupled: false }
parameters { key: "engine_of" value { string_value: "modelled" } }
"""


@contextmanager
def serving(step_ms: float) -> Iterator[Address]:
    os.environ |= modelled(step_ms / 1e3)
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        without_weights(repository / "modelled" / "1" / "weights", replace(SHAPES["tiny"], vocab=64))
        (repository / TWIN / "1").mkdir(parents=True)
        for name, config in (("modelled", MODEL_CONFIG), (TWIN, TWIN_CONFIG)):
            (repository / name / "config.pbtxt").write_text(config)
        with serving_repository(repository, TWIN, ports=free_ports(4), arguments=("--allow-faults",)) as address:
            yield address


def measure(address: Address, transport: str, options: Any) -> dict[str, Any]:
    authority = address.http if transport == "infer" else address.grpc
    asked = Asked(authority, TWIN, options.tokens, "ModelInfer")
    with reading(Case(options.in_flight, transport, 0.0, ""), asked) as (client, pipe):
        if not pipe.poll(START_LIMIT_S):
            raise RuntimeError(f"no answers after {START_LIMIT_S:g} s")
        pipe.recv()
        time.sleep(SETTLE_S)
        pids = processes() | {"client": [client]}
        before = cpu_seconds(pids)
        pipe.send("begin")
        time.sleep(options.seconds)
        after = cpu_seconds(pids)
        pipe.send("end")
        received = pipe.recv()
    count = max(received.num_responses, 1)
    assert received.num_tokens % count == 0, "answers differ in length"
    return {
        "requests_per_s": round(received.num_responses / received.seconds),
        "cpu_us_per_request": {name: round(1e6 * (after[name] - before[name]) / count) for name in PROCESSES},
    }


def main() -> None:
    study = Study("short_requests", __doc__, "numpy", "tritonclient")
    study.add_argument("--in-flight", type=int, default=64)
    study.add_argument("--tokens", type=int, default=4, help="of an answer")
    study.add_argument("--step-ms", type=float, default=2.0, help="of every step (default: %(default)g)")
    study.add_argument("--seconds", type=float, default=5.0, help="of a run")
    study.add_argument("--rounds", type=int, default=3)
    options = study.begin()
    with serving(options.step_ms) as address:
        runs = {name: lambda name=name: measure(address, name, options) for name in TRANSPORTS}
        samples = in_turns(runs, options.rounds, warm_up=1)
    show(
        {
            "transport": name,
            "requests/s": row["requests_per_s"],
            **{f"{process}, us": spent for process, spent in row["cpu_us_per_request"].items()},
        }
        for name, rows in samples.items()
        for row in rows
    )
    rates = {name: summary([row["requests_per_s"] for row in rows]) for name, rows in samples.items()}
    given = {name: getattr(options, name) for name in ("in_flight", "tokens", "step_ms")}
    study.save({**given, "requests_per_s": rates, "runs": samples})


if __name__ == "__main__":
    main()
