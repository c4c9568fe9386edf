"""Drive the demo model with locust users of each kind, and watch server and client.

    python benchmarks/locust_load.py --save

Rates over numbers of users show where the server is full.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil

from serving import LOCUSTFILE, Address, metric, served
from study import ROOT, Study, show

WEIGHTS = ROOT / "model_repository" / "demo" / "1" / "weights"
KINDS = {"GrpcStreamUser": "GRPC", "HttpStreamUser": "SSE", "HttpInferUser": "INFER"}
SHOWN = (
    "users", "requests", "failures", "requests_counted_by_server", "requests_per_s", "client_cores", "server_cores",
    "server_memory_growth_mib", "load_average",
)  # fmt: skip
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
    return metric(address, "vllm:request_success_total", finished_reason="length")


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
    rows = {row["method"]: summarise(row) for row in json.loads(output)}
    return {
        "users": users,
        "seconds": round(elapsed, 1),
        "failures": sum(row["failures"] for row in rows.values()),
        "requests": rows[KINDS[kind]]["count"],
        "requests_counted_by_server": round(num_answered(address) - answered),
        "requests_per_s": rows[KINDS[kind]]["count"] / elapsed,
        "client_cores": client_cpu / samples[-1][0],  # up to the last sample
        "server_cores": server_cores,
        "server_memory_mib": samples,
        "server_memory_growth_mib": growth([value for _, value in samples]),
        "load_average": os.getloadavg()[0],
        "rows_ms": rows,
    }


def summarise(row: dict[str, Any]) -> dict[str, Any]:
    times = {float(key): int(count) for key, count in row["response_times"].items()}
    ordered = sorted(times.items())
    return {
        "count": row["num_requests"],
        "failures": row["num_failures"],
        "mean": row["total_response_time"] / max(row["num_requests"], 1),
        **{f"p{q}": percentile(ordered, q / 100) for q in (50, 95, 99)},
        "max": row["max_response_time"],
    }


def percentile(ordered: list[tuple[float, int]], share: float) -> float:
    """Return a quantile of ordered (value, count) pairs, rounded by locust."""
    left = share * sum(count for _, count in ordered)
    for value, count in ordered:
        left -= count
        if left <= 0:
            return value
    return ordered[-1][0] if ordered else 0.0


def growth(samples: list[float]) -> float:
    """Return the last quarter's median less the second's; the first holds the warm-up."""
    quarter = max(len(samples) // 4, 1)
    return statistics.median(samples[-quarter:]) - statistics.median(samples[quarter : 2 * quarter] or samples)


def checks(run: dict[str, Any], sweep: list[dict[str, Any]], kind: str) -> dict[str, float | None]:
    """Return evidence that the server was full and the numbers agree.

    `client_share`, of a core, is well below 1 if locust is no bottleneck; `rate_over_fewer_users` about 1 if more
    users gain nothing; `users_by_littles_law` a little below the number of users.
    """
    before = max((one["requests_per_s"] for one in sweep), default=0.0)
    return {
        "failures": run["failures"],
        "unaccounted": run["requests"] - run["requests_counted_by_server"],
        "client_share": run["client_cores"],
        "rate_over_fewer_users": run["requests_per_s"] / before if before else None,
        "users_by_littles_law": run["requests_per_s"] * run["rows_ms"][KINDS[kind]]["mean"] / 1e3,
        "server_memory_growth_mib": run["server_memory_growth_mib"],
    }


def main() -> None:
    study = Study("locust", __doc__, "locust", "grpcio", "gevent", "torch")
    study.add_argument("--users", type=int, default=200)
    study.add_argument("--seconds", type=int, default=120)
    study.add_argument("--sweep", type=int, nargs="*", default=[10, 50, 100], help="more numbers of users, for short")
    study.add_argument("--sweep-seconds", type=int, default=20)
    options = study.begin()
    with served(WEIGHTS, {"kv_cache_memory_mb": 256}) as address:
        server = processes()

        def run(kind: str, users: int, seconds: int) -> dict[str, Any]:
            found = run_locust(address, kind, users, seconds, server)
            show([{"kind": kind, **{name: found[name] for name in SHOWN}}])
            return found

        sweep = {kind: [run(kind, users, options.sweep_seconds) for users in options.sweep] for kind in KINDS}
        runs = {kind: run(kind, options.users, options.seconds) for kind in KINDS}
    found = {kind: checks(runs[kind], sweep[kind], kind) for kind in KINDS}
    for kind in KINDS:
        print(kind, found[kind])
    study.save({"checks": found, "runs": runs, "sweep": sweep})


if __name__ == "__main__":
    main()
