"""Drive the demo model with locust users of each kind, and watch server and client.

python benchmarks locust_load --save
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil

from common.serving import LOCUSTFILE, Address, metric, served
from common.study import ROOT, Study, show

WEIGHTS = ROOT / "model_repository" / "demo" / "1" / "weights"
KINDS = {"GrpcStreamUser": "GRPC", "HttpStreamUser": "SSE", "HttpInferUser": "INFER"}
SAMPLE_S = 5.0
FLUSH_S = 2.0  # of counts on the server
MIB = 1 << 20


def processes() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def cpu_seconds(group: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in group if process.is_running())


def memory_mib(group: list[psutil.Process]) -> float:
    return sum(process.memory_info().rss for process in group if process.is_running()) / MIB


def num_answered(address: Address) -> float:
    return metric(address.metrics, "vllm:request_success_total", finished_reason="length")


def run_locust(address: Address, kind: str, users: int, seconds: int, server: list[psutil.Process]) -> dict[str, Any]:
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--json", "--skip-log"]
    command += ["-u", str(users), "-r", str(max(users // 4, 1)), "-t", f"{seconds}s", "--stop-timeout", "60"]
    command += ["--grpc-url", address.grpc, "--host", f"http://{address.http}", "--model", address.model, kind]
    answered, server_cpu, started = num_answered(address), cpu_seconds(server), time.perf_counter()
    samples: list[tuple[float, float]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        client = psutil.Process(process.pid)
        while True:
            samples.append((round(time.perf_counter() - started, 1), round(memory_mib(server), 1)))
            client_cpu = sum(client.cpu_times()[:2])
            try:
                output, _ = process.communicate(timeout=SAMPLE_S)
                break
            except subprocess.TimeoutExpired:
                continue
    elapsed = time.perf_counter() - started
    server_cores = (cpu_seconds(server) - server_cpu) / elapsed
    time.sleep(FLUSH_S)
    rows = {row["method"]: row for row in json.loads(output)}
    requests = rows[KINDS[kind]]["num_requests"]
    return {
        "kind": kind,
        "users": users,
        "seconds": round(elapsed, 1),
        "requests": requests,
        "failures": sum(row["num_failures"] for row in rows.values()),
        "requests_counted_by_server": round(num_answered(address) - answered),
        "requests_per_s": requests / elapsed,
        "mean_ms": rows[KINDS[kind]]["total_response_time"] / max(requests, 1),
        "client_cores": client_cpu / samples[-1][0],  # up to the last sample
        "server_cores": server_cores,
        "server_memory_growth_mib": growth([value for _, value in samples]),
        "load_average": os.getloadavg()[0],
    }


def growth(samples: list[float]) -> float:
    """Return the last quarter's median less the second's; the first holds the warm-up."""
    quarter = max(len(samples) // 4, 1)
    return statistics.median(samples[-quarter:]) - statistics.median(samples[quarter : 2 * quarter] or samples)


def main() -> None:
    study = Study("locust", __doc__, "locust", "grpcio", "gevent", "torch")
    study.add_argument("--users", type=int, nargs="+", default=[200], help="several show where it is full")
    study.add_argument("--seconds", type=int, default=120, help="of each run")
    options = study.begin()
    runs = []
    with served(WEIGHTS, {"kv_cache_memory_mb": 256}) as address:
        server = processes()
        for kind, users in itertools.product(KINDS, options.users):
            runs.append(run_locust(address, kind, users, options.seconds, server))
            show([runs[-1]])
    study.save({"runs": runs})


if __name__ == "__main__":
    main()
