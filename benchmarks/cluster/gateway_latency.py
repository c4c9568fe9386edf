"""What a gateway adds to a request and to a chunk, against the gRPC port of the replica behind it."""

from __future__ import annotations

import contextlib
import select
import socket
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from common.serving import free_ports
from common.stream_readers import Asked, GrpcReader, LineReader, OpenAiReader
from common.study import ROOT

WARM_UP = 20
LONG = 1 << 14  # tokens of a stream that outlasts its measurement
NUM_PAIRS = 4
START_S = 60.0
SETTLE_S = 0.2

Asker = GrpcReader | OpenAiReader
Reader = Asker | LineReader


def of_requests(straight: str, gateway: str, model: str, count: int) -> dict[str, Any]:
    """Return milliseconds from the sending to the token of requests for one token, in turns."""
    readers: dict[str, Asker] = {
        "straight": GrpcReader(Asked(straight, model, 1), 0, again=False),
        "gateway": OpenAiReader(Asked(gateway, model, 1), again=False),
    }
    taken: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(WARM_UP + count):
        for name, reader in readers.items():
            taken[name].append(1e3 * first_token_s(reader))
    for reader in readers.values():
        reader.socket.close()
    medians = {name: round(statistics.median(times[WARM_UP:]), 3) for name, times in taken.items()}
    return {**{f"{name}_ms": median for name, median in medians.items()},
            "added_ms": round(medians["gateway"] - medians["straight"], 3), "requests": count}  # fmt: skip


def first_token_s(reader: Asker) -> float:
    """Send a request, and read it to its end."""
    num_ended, first, sent = reader.num_ended, 0.0, time.perf_counter()
    reader.send()
    while reader.num_ended == num_ended:
        num_tokens = sum(count for _, count in reader.read())
        if num_tokens and not first:
            first = time.perf_counter()
    return first - sent


def of_chunks(straight: str, gateway: str, model: str, seconds: float) -> dict[str, Any]:
    """Return microseconds by which chunks of one step come later through the gateway, and through bare forwarders.

    Two streams of one engine get their tokens in the same steps; one is read straight, the other not. The front end
    sends the older stream's first, so each is the older one in half of the pairs.
    """
    with forwarder("grpc.aio", straight, model) as library, forwarder("frames", straight, model) as frames:
        ways: dict[str, Callable[[], Reader]] = {
            "": lambda: OpenAiReader(Asked(gateway, model, LONG)),
            "forwarder_": lambda: LineReader(library),
            "frames_": lambda: LineReader(frames),
        }
        found: dict[str, list[list[float]]] = {name: [] for name in ways}
        for number in range(NUM_PAIRS * len(ways)):
            name, way = list(ways.items())[number % len(ways)]
            is_older = number // len(ways) % 2 == 0
            found[name].append(pair(straight, way, model, seconds / NUM_PAIRS, other_first=is_older))
    return {key: figure for name, pairs in found.items() for key, figure in later_by(name, pairs).items()}


def later_by(name: str, pairs: list[list[float]]) -> dict[str, Any]:
    together = [later for found in pairs for later in found]
    return {
        f"{name}added_us": round(1e6 * statistics.mean(map(statistics.median, pairs)), 1),
        f"{name}added_us_p99": round(1e6 * float(np.percentile(together, 99)), 1),
        f"{name}chunks": len(together),
    }


@contextlib.contextmanager
def forwarder(way: str, straight: str, model: str) -> Iterator[str]:
    """Start `bare_forwarder.py`, and return where it listens."""
    port = free_ports(1)
    program = str(ROOT / "benchmarks")
    process = subprocess.Popen(
        [sys.executable, program, "bare_forwarder", str(port), straight, model, str(LONG), way]
    )
    try:
        wait_listening(port)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def wait_listening(port: int) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port} after {START_S:g} s")


def pair(straight: str, way: Callable[[], Reader], model: str, seconds: float, *, other_first: bool) -> list[float]:
    """Return the seconds between the arrivals of chunks that belong together."""
    makers: list[Callable[[], Reader]] = [lambda: GrpcReader(Asked(straight, model, LONG), 1), way]
    readers = []
    for make in reversed(makers) if other_first else makers:
        readers.append(make())
        wait_until_it_flows(readers[-1])
    arrivals = arrivals_of(readers, seconds)
    for reader in readers:
        reader.socket.close()
    there, here = arrivals if other_first else reversed(arrivals)
    return matched(here, there)


def wait_until_it_flows(reader: Reader) -> None:
    while not sum(count for _, count in reader.read()):
        pass


def arrivals_of(readers: list[Reader], seconds: float) -> list[list[float]]:
    poll = select.epoll()
    by_descriptor = {reader.socket.fileno(): index for index, reader in enumerate(readers)}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    found: list[list[float]] = [[] for _ in readers]
    begin = time.perf_counter() + SETTLE_S  # until what has gathered is read
    while (now := time.perf_counter()) < begin + seconds:
        for descriptor, _ in poll.poll(0.1):
            index, arrived = by_descriptor[descriptor], time.perf_counter()
            found[index] += [arrived for _, count in readers[index].read() if count and now > begin]
    poll.close()
    return found


def matched(here: list[float], there: list[float]) -> list[float]:
    """Return the differences of nearest arrivals: `there` minus `here`. The ends may have no partner."""
    differences = []
    for moment in there[1:-1]:
        index = bisect_left(here, moment)
        near = here[max(index - 1, 0) : index + 1]
        differences.append(min((moment - one for one in near), key=abs))
    return differences
