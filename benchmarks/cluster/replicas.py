"""Several replicas with a modelled device behind one gateway: throughput, latency, sessions, deaths, scaling.

    python benchmarks replicas --save
    python benchmarks replicas --parts throughput --replicas 1 2 --seconds 5

Servers, gateway and their traffic are real, on one machine; the device is a formula (`modelled/engine.py`), slowed
until all replicas together need less than 60 % of the cores. `--over list`: servers that a name has, with
`tidewheel gateway --url dns:…`; `--over ray`: `tidewheel cluster`.

latency     requests for one token, and streams of one engine, straight by gRPC and through the gateway
throughput  streams through the gateway, as many for each replica; CPU time of each part
sessions    conversations: turns that find what the turn before left in a cache, and the load of each replica
kill        SIGKILL to all processes of a replica, which is started again at once
orphan      SIGKILL to the process above a replica's server alone
scaling     conversations while replicas go and come
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from cluster import gateway_latency
from cluster import replica_cases as cases
from cluster.ray_cluster import RayServers
from cluster.servers import ListServers, Servers
from common.random_model import without_weights
from common.study import Study, show
from modelled.roofline import SHAPES
from tidewheel.fleet.router import LOAD_FACTOR

OVER: Mapping[str, Callable[[Path, Mapping[str, object], float], Servers]] = {"list": ListServers, "ray": RayServers}
PARTS = ("latency", "throughput", "sessions", "kill", "orphan", "scaling")
LATENCY_STEP_S = 0.01
MOST_OF_CORES = 0.6
SLOWEST_MS = 800.0
MOST_REPLICAS = 64


class Goal(NamedTuple):
    part: str
    figure: str
    of: Callable[[Any], float]
    least: float = 0.0
    most: float = math.inf


GOALS = (
    Goal("latency", "added ms of a request", lambda part: part["request"]["added_ms"], most=2.0),
    Goal("latency", "added us of a chunk", lambda part: part["chunk"]["added_us"], most=100.0),
    Goal("throughput", "of linear", lambda rows: rows[-1]["of_linear"], least=0.95),
    Goal("throughput", "of all cores", lambda rows: rows[-1]["of_all_cores"], most=MOST_OF_CORES),
    Goal("sessions", "% of later turns on their cache", lambda part: part["on_their_cache_percent"], least=95.0),
    Goal("sessions", "requests, max over mean", lambda part: part["requests_max_over_mean"], most=1.25),
    Goal("kill", "lost that had not begun", lambda part: part["not_begun_lost"], most=0),
    Goal("kill", "seconds until the others are told", lambda part: part["told_after_s"], most=1.0),
    Goal("orphan", "lost that had not begun", lambda part: part["not_begun_lost"], most=0),
    Goal("orphan", "seconds until the others are told", lambda part: part["told_after_s"], most=1.0),
    Goal("scaling", "cut or lost", lambda part: part["cut_or_lost"], most=0),
)


def judged(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each goal of the parts that were measured, and whether it is met."""
    rows = []
    for goal in (goal for goal in GOALS if goal.part in found):
        value = goal.of(found[goal.part])
        limit = f"at least {goal.least:g}" if goal.most == math.inf else f"at most {goal.most:g}"
        is_met = goal.least <= value <= goal.most
        rows.append({"part": goal.part, "figure": goal.figure, "value": value, "goal": limit, "met": is_met})
    return rows


def rows(streams: int) -> int:
    """Return the rows of an engine: routers promise no more than a replica's share times their factor."""
    return math.ceil(LOAD_FACTOR * streams)


def settings(streams: int) -> dict[str, object]:
    settings = {"max_num_seqs": rows(streams), "max_num_batched_tokens": 8192, "default_max_tokens": "context"}
    return settings | {"device_slice_ms": 0}  # each has a device of its own, and takes no turns


def latency(servers: Servers, requests: int, seconds: float) -> dict[str, Any]:
    servers.scale(1)
    straight = servers.replicas()[0].grpc
    return {
        "request": gateway_latency.of_requests(straight, servers.gateway, servers.model, requests),
        "chunk": gateway_latency.of_chunks(straight, servers.gateway, servers.model, seconds),
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
            "kill": lambda: cases.kill(servers, rows(options.streams) * most * 6 // 5, alone=False),
            "orphan": lambda: cases.kill(servers, rows(options.streams) * most * 6 // 5, alone=True),
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


def replicas(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_REPLICAS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of replicas: 1 to {MOST_REPLICAS}")
    return int(text)


def main() -> None:
    study = Study("cluster", __doc__, "numpy", "tritonclient", "aiohttp", "ray")
    study.add_argument("--over", choices=OVER, default="list", help="how replicas are started and found")
    study.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    study.add_argument("--replicas", type=replicas, nargs="+", default=[1, 2, 4], metavar="N")
    study.add_argument("--streams", type=int, default=16, help="of a replica (default: %(default)s)")
    study.add_argument("--step-ms", type=float, default=100.0, help="of the device, doubled while it is too fast")
    study.add_argument("--seconds", type=float, default=10.0, help="of a run")
    study.add_argument("--requests", type=int, default=300, help="whose latency is compared")
    options = study.begin()
    with tempfile.TemporaryDirectory(prefix="tw-") as folder:
        model = without_weights(Path(folder) / "modelled", replace(SHAPES["tiny"], vocab=64))
        found = measure(model, options)
    show(judged(found))
    name = "cluster" if options.over == "list" else f"cluster_{options.over}"
    study.save({"over": options.over, "seconds": options.seconds, "goals": judged(found), **found}, name)


if __name__ == "__main__":
    main()
