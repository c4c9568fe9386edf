"""Several replicas with a modelled device behind one gateway: throughput, latency, sessions, deaths, scaling.

    python benchmarks/cluster.py --save
    python benchmarks/cluster.py --parts throughput --replicas 1 2 --seconds 5

Servers, gateway and their traffic are real, on one machine; the device is a formula (`modelled_engine.py`), slowed
until all replicas together need less than 60 % of the cores. `--over list`: servers that a name has, with
`tidewheel gateway --url dns:…`; `--over ray`: `tidewheel cluster`.

latency     requests for one token, and streams of one engine, straight by gRPC and through the gateway
throughput  streams through the gateway, as many for each replica; CPU time of each part
sessions    conversations: turns that find what the turn before left in a cache, and the load of each replica
kill        SIGKILL to all processes of a replica, which is started again at once
scaling     conversations while replicas go and come
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cluster_cases as cases
import cluster_latency
from cluster_on_ray import RayServers
from cluster_servers import ListServers, Servers
from random_model import without_weights
from roofline import SHAPES
from study import Study, show

OVER: Mapping[str, Callable[[Path, Mapping[str, object], float], Servers]] = {"list": ListServers, "ray": RayServers}
PARTS = ("latency", "throughput", "sessions", "kill", "scaling")
LATENCY_STEP_S = 0.01
MOST_OF_CORES = 0.6
SLOWEST_MS = 800.0


def settings(streams: int) -> dict[str, object]:
    return {"max_num_seqs": streams, "max_num_batched_tokens": 8192, "default_max_tokens": "context"}


def latency(servers: Servers, requests: int, seconds: float) -> dict[str, Any]:
    servers.scale(1)
    straight = servers.replicas()[0].grpc
    return {
        "request": cluster_latency.of_requests(straight, servers.gateway, servers.model, requests),
        "chunk": cluster_latency.of_chunks(straight, servers.gateway, servers.model, seconds),
    }


def throughputs(servers: Servers, options: Any, step_ms: float) -> list[dict[str, Any]]:
    rows = [
        cases.throughput(servers, count, options.streams, step_ms, options.seconds)
        for count in sorted(options.replicas)
    ]
    least = rows[0]["tokens_per_s"] / rows[0]["replicas"]
    return [row | {"of_linear": round(row["tokens_per_s"] / row["replicas"] / least, 3)} for row in rows]


def measure(model: Path, options: Any) -> dict[str, Any]:
    make = OVER[options.over]
    found: dict[str, Any] = {}
    if "latency" in options.parts:
        with make(model, settings(options.streams), LATENCY_STEP_S) as servers:
            found["latency"] = latency(servers, options.requests, options.seconds)
            show([{"part": part, **figures} for part, figures in found["latency"].items()][:1])
            show([found["latency"]["chunk"]])
    if set(options.parts) == {"latency"}:
        return found
    step_ms = options.step_ms
    while not under_load(make, model, options, step_ms, found) and step_ms < SLOWEST_MS:
        step_ms *= 2
    return found


def under_load(make: Any, model: Path, options: Any, step_ms: float, found: dict[str, Any]) -> bool:
    """Measure the parts with a device of this speed. Return False, without the others, if it is too fast."""
    with make(model, settings(options.streams), step_ms / 1e3) as servers:
        if "throughput" in options.parts:
            found["throughput"] = throughputs(servers, options, step_ms)
            show(map(flat, found["throughput"]))
            if found["throughput"][-1]["of_all_cores"] >= MOST_OF_CORES and step_ms < SLOWEST_MS:
                return False
        most = max(options.replicas)
        servers.scale(most)
        runs: dict[str, Callable[[], dict[str, Any]]] = {
            "sessions": lambda: cases.sessions(servers, options.streams * most, options.seconds),
            "kill": lambda: cases.kill(servers, options.streams * most * 3 // 2),
            "scaling": lambda: cases.scaling(servers, options.streams * most // 2, max(most // 2, 1)),
        }
        for name in [name for name in runs if name in options.parts]:
            found[name] = runs[name]()
            print(f"\n{name}")
            show([{"figure": key, "": value} for key, value in found[name].items()])
    return True


def flat(row: Mapping[str, Any]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name != "cores"} | {
        f"cores {part}": used for part, used in row["cores"].items()
    }


def main() -> None:
    study = Study("cluster", __doc__, "numpy", "tritonclient", "aiohttp", "ray")
    study.add_argument("--over", choices=OVER, default="list", help="how replicas are started and found")
    study.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    study.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    study.add_argument("--streams", type=int, default=16, help="of a replica (default: %(default)s)")
    study.add_argument("--step-ms", type=float, default=100.0, help="of the device, doubled while it is too fast")
    study.add_argument("--seconds", type=float, default=10.0, help="of a run")
    study.add_argument("--requests", type=int, default=300, help="whose latency is compared")
    options = study.begin()
    with tempfile.TemporaryDirectory(prefix="tw-") as folder:
        model = without_weights(Path(folder) / "modelled", replace(SHAPES["tiny"], vocab=64))
        found = measure(model, options)
    name = "cluster" if options.over == "list" else f"cluster_{options.over}"
    study.save({"over": options.over, "seconds": options.seconds, **found}, name)


if __name__ == "__main__":
    main()
