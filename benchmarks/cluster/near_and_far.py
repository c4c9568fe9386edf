"""A near server, and a far one that costs more behind a slow link: goodput, shares, and first tokens of near ones.

    python benchmarks near_and_far --save

Servers, gateway, link and their traffic are real, on one machine; the device is a formula (`modelled/engine.py`), so
that capacity is known: rows times tokens per second of a row, over the tokens of an answer. The link delays every
byte by half of `--round-trip-ms`, each way. Requests are streams that arrive at random (Poisson), the same for every
run, NORMAL in class; an answer is good if its first token comes within the class's 2 s. Rates are shares of the near
server's capacity. The near server alone and both take turns.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cluster.servers import wait_known
from cluster.user_load import Users
from common.random_model import without_weights
from common.serving import Served, free_ports, metric
from common.study import Study, in_turns, show
from modelled.engine import modelled
from modelled.roofline import SHAPES
from tidewheel.fleet.scaling import QUEUE_LIMITS_S
from tidewheel.request import Priority

OBJECTIVE_S = QUEUE_LIMITS_S[Priority.NORMAL]
ROWS, STEP_S = 8, 0.05
PROMPT_TOKENS, ANSWER_TOKENS = 100, 20
CAPACITY = ROWS / STEP_S / ANSWER_TOKENS  # requests/s
_SENT = "tidewheel_gateway_upstream_requests_total"


@contextmanager
def slow_link(target: str, one_way_s: float) -> Iterator[int]:
    """Forward a port of loopback, which is yielded, to an authority; each way takes so long."""
    loop, host, port = asyncio.new_event_loop(), *target.split(":")

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            loop.call_later(one_way_s, writer.write, data)
        loop.call_later(one_way_s, writer.close)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer), return_exceptions=True)

    server = loop.run_until_complete(asyncio.start_server(connect, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@contextmanager
def gateway_to(*urls: str) -> Iterator[str]:
    """Yield the authority of a gateway that finds all servers ready."""
    authority = f"127.0.0.1:{free_ports(1)}"
    command = [sys.executable, "-m", "tidewheel.cli.main", "gateway", "--port", authority.rpartition(":")[2]]
    process = subprocess.Popen(
        [*command, *(part for url in urls for part in ("--url", url))], stdout=subprocess.DEVNULL
    )
    try:
        wait_known(authority, len(urls))
        yield authority
    finally:
        process.terminate()
        process.wait(60)


def run(gateway: str, model: str, rate: float, seconds: float, far: str) -> dict[str, Any]:
    """Offer requests at the rate, and return what became of them; `far`: the far server's authority, or empty."""
    arrivals = np.random.default_rng(0).exponential(1 / rate, round(rate * seconds)).cumsum()
    before = metric(gateway, _SENT, upstream=far)
    load = Users(gateway, model, turns=1, prompt_tokens=PROMPT_TOKENS, answer_tokens=ANSWER_TOKENS)
    begun = time.monotonic()
    asyncio.run(load.offer(arrivals.tolist()))
    outcomes = load.outcomes
    waits = [one.first - one.sent if one.is_whole else float("inf") for one in outcomes]
    num_good = sum(wait <= OBJECTIVE_S for wait in waits)
    num_far = metric(gateway, _SENT, upstream=far) - before
    return {
        "requests": len(outcomes),
        "good": num_good / len(outcomes),
        "goodput_per_s": num_good / float(arrivals[-1]),
        "far": num_far / len(outcomes),
        "first_token_p50_ms": 1e3 * statistics.median(waits),
        "first_token_p95_ms": 1e3 * float(np.quantile(waits, 0.95)),
        "seconds": time.monotonic() - begun,
        "errors": sum(bool(one.error) for one in outcomes),
    }


def table(load: float, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row for each of the two: medians over its runs."""
    return [
        {"load": load, "servers": name, **{key: statistics.median(one[key] for one in runs) for key in runs[0]}}
        for name, runs in found.items()
    ]


def main() -> None:
    study = Study("near_and_far", __doc__, "numpy", "tritonclient", "aiohttp")
    study.add_argument("--loads", type=float, nargs="+", default=[0.4, 0.7, 1.0, 1.5, 2.0], metavar="SHARE")
    study.add_argument("--round-trip-ms", type=float, default=100.0, metavar="MS")
    study.add_argument("--seconds", type=float, default=20.0, help="of a run")
    study.add_argument("--repeats", type=int, default=3)
    options = study.begin()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tw-")))
        model = without_weights(folder / "modelled", replace(SHAPES["tiny"], vocab=64))
        # Each has a device of its own: no turns (`device_slice_ms`).
        settings = {"max_num_seqs": ROWS, "max_num_batched_tokens": 8192, "device_slice_ms": 0}
        arguments = ["--model", str(model), "--allow-faults"]
        arguments += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        environment = {**os.environ, **modelled(STEP_S)}
        servers = [Served(arguments, model.name, free_ports(4), environment=environment) for _ in range(2)]
        for server in servers:
            stack.callback(server.stop)
            server.wait_ready()
        near, far = (server.address.grpc for server in servers)
        link = stack.enter_context(slow_link(far, options.round_trip_ms / 2e3))
        far = f"127.0.0.1:{link}"
        gateways = {
            "near": stack.enter_context(gateway_to(near)),
            "near and far": stack.enter_context(gateway_to(near, f"{far},cost=1")),
        }
        for load in options.loads:
            runs = {
                name: lambda gateway=gateway, load=load: run(
                    gateway, model.name, load * CAPACITY, options.seconds, far
                )
                for name, gateway in gateways.items()
            }
            rows += table(load, in_turns(runs, options.repeats, warm_up=0))
            show(rows[-2:])
    facts = {"capacity_per_s": CAPACITY, "rows": ROWS, "step_s": STEP_S, "answer_tokens": ANSWER_TOKENS}
    study.save({"round_trip_ms": options.round_trip_ms, "objective_s": OBJECTIVE_S, **facts, "rows_of_table": rows})


if __name__ == "__main__":
    main()
