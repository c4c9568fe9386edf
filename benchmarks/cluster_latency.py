"""What a gateway adds to a request and to a chunk, against the gRPC port of the replica behind it."""

from __future__ import annotations

import select
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np

from stream_readers import Asked, GrpcReader, OpenAiReader

WARM_UP = 20
LONG = 1 << 14  # tokens of a stream that outlasts its measurement
NUM_PAIRS = 4
SETTLE_S = 0.2

Reader = GrpcReader | OpenAiReader


def of_requests(straight: str, gateway: str, model: str, count: int) -> dict[str, Any]:
    """Return milliseconds from the sending to the token of requests for one token, in turns."""
    readers: dict[str, Reader] = {
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


def first_token_s(reader: Reader) -> float:
    """Send a request, and read it to its end."""
    num_ended, first, sent = reader.num_ended, 0.0, time.perf_counter()
    reader.send()
    while reader.num_ended == num_ended:
        num_tokens = sum(count for _, count in reader.read())
        if num_tokens and not first:
            first = time.perf_counter()
    return first - sent


def of_chunks(straight: str, gateway: str, model: str, seconds: float) -> dict[str, Any]:
    """Return microseconds by which chunks of one step come later through the gateway.

    Two streams of one engine get their tokens in the same steps; one is read straight and one through the gateway.
    The front end sends the older stream's first, so each is the older one in half of the pairs.
    """
    added: list[float] = []
    halves = []
    for number in range(NUM_PAIRS):
        found = pair(straight, gateway, model, seconds / NUM_PAIRS, gateway_first=number % 2 == 0)
        halves.append(statistics.median(found))
        added += found
    return {
        "added_us": round(1e6 * statistics.mean(halves), 1),
        "added_us_p99": round(1e6 * float(np.percentile(added, 99)), 1),
        "chunks": len(added),
    }


def pair(straight: str, gateway: str, model: str, seconds: float, *, gateway_first: bool) -> list[float]:
    """Return the seconds between the arrivals of chunks that belong together."""

    makers: list[Callable[[], Reader]] = [
        lambda: GrpcReader(Asked(straight, model, LONG), 1),
        lambda: OpenAiReader(Asked(gateway, model, LONG)),
    ]
    readers = []
    for make in reversed(makers) if gateway_first else makers:
        readers.append(make())
        wait_until_it_flows(readers[-1])
    arrivals = arrivals_of(readers, seconds)
    for reader in readers:
        reader.socket.close()
    there, here = arrivals if gateway_first else reversed(arrivals)
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
