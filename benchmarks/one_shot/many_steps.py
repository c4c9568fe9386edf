"""Pictures of the digits model through the real server: together or one after another, and beside a flood, in turns.

    python benchmarks many_steps --save

*Joined*: requests of different step counts arrive at random; *one by one*: each is sent when the last one ended.
*Alone*: one user sends CRITICAL requests with pauses; *flooded*: the same, while LOW requests are always in flight.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from common.serving import Address, free_ports, served
from common.study import ROOT, Study, in_turns, show, summary
from tidewheel.bench.estimates import quantile
from tidewheel.request import Priority

DIGITS = ROOT / "demo_model" / "digits"
SETTINGS = {
    "num_threads": "1",
    "adapter": "diffusers",
    "adapter_options": '{"null_label": 10, "default_guidance": 2, "default_steps": 20}',
}
STEPS = (10, 50)
CRITICAL_STEPS = 20
PAUSE_S = 0.05  # mean, between two CRITICAL requests
SETTLE_S = 1.0  # before latencies count


class Pictures:
    """Clients of the model."""

    def __init__(self, address: Address, seed: int) -> None:
        self._address, self._rng, self._seeds = address, random.Random(seed), itertools.count(1)

    def joined(self, count: int, rate: float) -> float:
        """Return steps a second of so many requests that arrive at random."""
        counts, at = self._counts(count), itertools.accumulate(self._rng.expovariate(rate) for _ in range(count))

        async def send_all() -> None:
            async with self._stub() as stub, asyncio.TaskGroup() as tasks:
                for steps, seconds in zip(counts, at, strict=True):
                    tasks.create_task(self._send(stub, steps, after_s=seconds))

        return _per_second(counts, send_all())

    def one_by_one(self, count: int) -> float:
        counts = self._counts(count)

        async def send_each() -> None:
            async with self._stub() as stub:
                for steps in counts:
                    await self._send(stub, steps)

        return _per_second(counts, send_each())

    def critical(self, seconds: float, num_low: int) -> dict[str, Any]:
        """Return latencies of CRITICAL requests once LOW ones flow, and LOW requests a second."""
        latencies, num_ended, end = list[float](), 0, time.monotonic() + SETTLE_S + seconds

        async def flood(stub: Any) -> None:
            nonlocal num_ended
            while time.monotonic() < end:
                await self._send(stub, self._rng.randint(*STEPS), Priority.LOW)
                num_ended += 1

        async def measure() -> None:
            async with self._stub() as stub:
                others = [asyncio.create_task(flood(stub)) for _ in range(num_low)]
                await asyncio.sleep(SETTLE_S)
                while time.monotonic() < end:
                    await asyncio.sleep(self._rng.expovariate(1 / PAUSE_S))
                    latencies.append(await self._send(stub, CRITICAL_STEPS, Priority.CRITICAL))
                await asyncio.gather(*others)

        asyncio.run(measure())
        return {"latencies": latencies, "low_per_s": num_ended / (SETTLE_S + seconds)}

    def _counts(self, count: int) -> list[int]:
        """Return step counts spread over `STEPS` in random order: the same sum each time."""
        return self._rng.sample([round(steps) for steps in np.linspace(*STEPS, count)], count)

    async def _send(self, stub: Any, steps: int, priority: int = Priority.NORMAL, after_s: float = 0.0) -> float:
        request = pb.ModelInferRequest(model_name=self._address.model)
        request.inputs.add(name="label", datatype="INT32", shape=[1])
        request.raw_input_contents.append(np.array([self._rng.randrange(10)], np.int32).tobytes())
        for name, value in (("steps", steps), ("seed", next(self._seeds)), ("qos_class", int(priority))):
            request.parameters[name].int64_param = value
        await asyncio.sleep(after_s)
        begin = time.monotonic()
        async for answer in stub.ModelStreamInfer(iter([request])):
            if answer.error_message:
                raise RuntimeError(answer.error_message)
        return time.monotonic() - begin

    @asynccontextmanager
    async def _stub(self) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(self._address.grpc) as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def _per_second(counts: list[int], work: Any) -> float:
    begin = time.monotonic()
    asyncio.run(work)
    return sum(counts) / (time.monotonic() - begin)


def main() -> None:
    study = Study("many_steps", __doc__, "diffusers", "torch", "tritonclient")
    study.add_argument("--requests", type=int, default=16)
    study.add_argument("--rate", type=float, default=80.0, help="of arrivals, a second")
    study.add_argument("--low", type=int, default=48, help="LOW requests in flight")
    study.add_argument("--seconds", type=float, default=15.0, help="of CRITICAL requests in a round")
    study.add_argument("--rounds", type=int, default=3)
    study.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the engine")
    study.add_argument("--seed", type=int, default=0)
    options = study.begin()
    settings = SETTINGS | dict(pair.split("=", 1) for pair in options.set)
    with served(DIGITS, settings, ports=free_ports(4)) as address:
        pictures = Pictures(address, options.seed)
        steps = in_turns(
            {"joined": lambda: pictures.joined(options.requests, options.rate),
             "one by one": lambda: pictures.one_by_one(options.requests)},
            2 * options.rounds,
        )  # fmt: skip
        critical = in_turns(
            {"alone": lambda: pictures.critical(options.seconds, 0),
             "flooded": lambda: pictures.critical(options.seconds, options.low)},
            options.rounds, warm_up=0,
        )  # fmt: skip
    ratios = [one / other for one, other in zip(steps["joined"], steps["one by one"], strict=True)]
    show({"requests": name, "steps/s": round(summary(found)["median"], 1)} for name, found in steps.items())
    print(f"joined over one by one: {summary(ratios)['median']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    figures = {name: _latency(rounds) for name, rounds in critical.items()}
    show(
        {"CRITICAL": name, **{f"{key}, ms": round(1e3 * row[f"{key}_s"], 1) for key in ("p50", "p99", "max")},
         "requests": row["requests"], "LOW/s": round(row["low_per_s"], 1)}
        for name, row in figures.items()
    )  # fmt: skip
    print(f"p99 flooded over alone: {figures['flooded']['p99_s'] / figures['alone']['p99_s']:.2f}")
    study.save(
        {"settings": settings, "requests": options.requests, "steps": STEPS, "rate": options.rate,
         "steps_per_s": {name: summary(found) for name, found in steps.items()}, "ratio": summary(ratios),
         "critical_steps": CRITICAL_STEPS, "low": options.low, "critical": figures}
    )  # fmt: skip


def _latency(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    every = [latency for one in rounds for latency in one["latencies"]]
    found = {f"{name}_s": quantile(every, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
    return {**found, "requests": len(every), "low_per_s": sum(one["low_per_s"] for one in rounds) / len(rounds)}


if __name__ == "__main__":
    main()
