"""Cases of `replicas.py`: each measures a `Servers` and returns its figures."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from cluster.servers import Servers, num_ready
from cluster.user_load import Outcome, Users, later_turns, percent
from common.serving import metric
from common.stream_readers import Asked
from path.stream_path import SETTLE_S, START_LIMIT_S, TOKENS_OF_A_STREAM, Case, cpu_seconds, reading

TURNS = 4
PROMPT_TOKENS = 150  # of a turn: more than two blocks
ANSWER_TOKENS = 10
LOOK_S = 0.25
LIMIT_S = 120.0
_RECEIVED = "tidewheel_requests_received_total"
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


def throughput(servers: Servers, count: int, streams: int, step_ms: float, seconds: float) -> dict[str, Any]:
    """Return tokens/s of `streams` a replica, and the CPU time of each part."""
    servers.scale(count)
    case = Case(count * streams, "openai", step_ms, "given")
    with reading(case, Asked(servers.gateway, servers.model, TOKENS_OF_A_STREAM)) as (client, pipe):
        if not pipe.poll(START_LIMIT_S):
            raise RuntimeError(f"not all of {case.streams} streams flow after {START_LIMIT_S:g} s")
        pipe.recv()
        time.sleep(SETTLE_S)
        pids = {**servers.pids(), "client": [client]}
        before = cpu_seconds(pids)
        pipe.send("begin")
        time.sleep(seconds)
        after = cpu_seconds(pids)
        pipe.send("end")
        received = pipe.recv()
    cpu = {name: (after[name] - before[name]) / received.seconds for name in pids}
    rate = received.num_tokens / received.seconds
    chunks = max(len(received.gaps_ms), 1)
    return {
        "replicas": count,
        "streams": case.streams,
        "step_ms": step_ms,
        "tokens_per_s": round(rate),
        "of_device": round(rate * step_ms / 1e3 / case.streams, 3),
        "cores": {name: round(used, 3) for name, used in cpu.items()},
        "of_all_cores": round(sum(cpu.values()) / (os.cpu_count() or 1), 3),
        "gateway_us_per_chunk": round(1e6 * cpu["gateway"] * received.seconds / chunks, 1),
    }


def sessions(servers: Servers, users: int, seconds: float) -> dict[str, Any]:
    """Return how many turns found their session's cache, and how even the load was."""
    replicas = servers.replicas()
    before = [metric(one.metrics, _RECEIVED) for one in replicas]
    ratios: list[float] = []

    async def run() -> list[Outcome]:
        load = conversations(servers)
        async with load.active(users):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await asyncio.sleep(LOOK_S)
                ratios.append(max_over_mean(await asyncio.to_thread(open_requests, servers)))
        return load.outcomes

    outcomes = asyncio.run(run())
    time.sleep(SETTLE_S)  # until the last figures are published
    received = [metric(one.metrics, _RECEIVED) - was for one, was in zip(replicas, before, strict=True)]
    return {
        "users": users,
        "requests": len(outcomes),
        "not_whole": not_whole(outcomes),
        "later_turns": sum(1 for _ in later_turns(outcomes)),
        "on_their_cache_percent": percent(outcomes),
        "requests_max_over_mean": round(max_over_mean(received), 3),
        "open_max_over_mean": round(sum(ratios) / max(len(ratios), 1), 3),
    }


def conversations(servers: Servers) -> Users:
    return Users(
        servers.gateway, servers.model, turns=TURNS, prompt_tokens=PROMPT_TOKENS, answer_tokens=ANSWER_TOKENS
    )


def open_requests(servers: Servers) -> list[float]:
    return [metric(one.metrics, _RUNNING) + metric(one.metrics, _WAITING) for one in servers.replicas()]


def max_over_mean(values: list[float]) -> float:
    return max(values) * len(values) / sum(values) if sum(values) else 1.0


def not_whole(outcomes: list[Outcome]) -> int:
    return sum(not one.is_whole for one in outcomes)


def kill(servers: Servers, users: int, *, alone: bool) -> dict[str, Any]:
    """Kill a replica under load, or what is above its server alone, and return what became of the requests."""
    count = len(servers.replicas())
    load = Users(servers.gateway, servers.model, turns=1, prompt_tokens=PROMPT_TOKENS, answer_tokens=ANSWER_TOKENS)

    async def run() -> tuple[float, float]:
        async with load.active(users):
            await asyncio.sleep(3.0)
            killed = await asyncio.to_thread(servers.kill_one, alone=alone)
            await until(lambda: 0 <= num_ready(servers.gateway) < count, "a gateway that knows of the death")
            await until(lambda: num_ready(servers.gateway) == count, "a replica that is ready again")
            back = time.monotonic()
            await asyncio.sleep(2.0)
        return killed, back

    killed, back = asyncio.run(run())
    return deaths(load.outcomes, killed, users) | {"back_after_s": round(back - killed, 2)}


def deaths(outcomes: list[Outcome], killed: float, users: int) -> dict[str, Any]:
    """Return the figures of requests before, at and after a death.

    One that broke had begun if a token had come, be it while the signals were sent.
    """
    at_the_time = [one for one in outcomes if one.sent <= killed < one.ended]
    begun = [one for one in at_the_time if one.first and (one.first <= killed or one.error)]
    not_begun = [one for one in at_the_time if one not in begun]
    broken = [one for one in begun if one.error]
    others = [one for one in outcomes if one not in at_the_time]
    return {
        "users": users,
        "requests": len(outcomes),
        "not_begun": len(not_begun),
        "not_begun_lost": not_whole(not_begun),
        "begun": len(begun),
        "begun_broken": len(broken),
        "begun_without_error_or_end": sum(not one.is_whole and not one.error for one in begun),
        "told_after_s": round(max((one.ended - killed for one in broken), default=0.0), 3),
        "other_requests_lost": not_whole(others),
        "errors": sorted({one.error for one in outcomes if one.error}),
    }


def scaling(servers: Servers, users: int, fewest: int) -> dict[str, Any]:
    """Take replicas away under load, and add as many again."""
    most = len(servers.replicas())
    load = conversations(servers)

    async def run() -> dict[str, float]:
        async with load.active(users):
            await asyncio.sleep(2.0)
            began = time.monotonic()
            await asyncio.to_thread(servers.scale, fewest)
            down = time.monotonic()
            await asyncio.sleep(2.0)
            up_began = time.monotonic()
            await asyncio.to_thread(servers.scale, most)
            up = time.monotonic()
            await asyncio.sleep(3.0)
        return {"down_s": round(down - began, 2), "up_s": round(up - up_began, 2)}

    times = asyncio.run(run())
    return {
        "users": users,
        "from_to": [most, fewest, most],
        **times,
        "requests": len(load.outcomes),
        "cut_or_lost": not_whole(load.outcomes),
        "errors": sorted({one.error for one in load.outcomes if one.error}),
        "on_their_cache_percent": percent(load.outcomes),
    }


async def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not await asyncio.to_thread(condition):
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {LIMIT_S:g} s")
        await asyncio.sleep(0.05)
