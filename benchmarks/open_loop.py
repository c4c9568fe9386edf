"""Open-loop load: requests are sent when their time comes, whether or not earlier ones were answered.

A closed loop slows down with the server and hides what overload does; arrivals here are a Poisson process drawn from
a seed. Every request is a gRPC stream of its own on shared channels, from one asyncio loop, so that the load costs
little beside a server on the same machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from workload import Lengths

NUM_CHANNELS = 4
GRACE_S = 60.0  # for what is still under way when the last request was sent


@dataclass(frozen=True)
class Offered:
    """One request: when it is sent, and what it asks for."""

    at: float  # seconds from the start of the run
    input_ids: list[int]
    num_output_tokens: int
    parameters: dict[str, Any] = field(default_factory=dict)  # priority, tenant, deadline_ms, …


@dataclass
class Outcome:
    """What became of it. Seconds from its own sending; None: never happened."""

    offered: Offered
    sent: float  # seconds from the start of the run
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    finish_reason: str = ""
    error: str = ""  # the message of the server, with its tag
    failed_after: float | None = None

    @property
    def tpot(self) -> float | None:
        """Mean time between output tokens."""
        if self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    @property
    def tag(self) -> str:
        return self.error.partition("]")[0].partition(" ")[0].strip("[")

    def is_good(self, ttft_s: float, tpot_s: float) -> bool:
        """Answered in full, within the service-level objective."""
        if self.first_token is None or self.num_tokens < self.offered.num_output_tokens:
            return False
        return self.first_token <= ttft_s and (self.tpot is None or self.tpot <= tpot_s)


def poisson_arrivals(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """Times of a Poisson process of `rate` per second, within `seconds`."""
    times, at = [], rng.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += rng.expovariate(rate)
    return times


def offer(
    times: Iterable[float],
    mix: Sequence[tuple[float, dict[str, Any]]],
    inputs: Lengths,
    outputs: Lengths,
    rng: random.Random,
    vocab: int = 10_000,
) -> list[Offered]:
    """A request for each time; `mix` gives the share and the parameters of each kind of request."""
    weights = [share for share, _ in mix]
    return [
        Offered(
            at,
            [rng.randrange(4, vocab) for _ in range(inputs.draw(rng))],
            outputs.draw(rng),
            rng.choices(mix, weights)[0][1],
        )
        for at in times
    ]


def run(address: str, model: str, load: Sequence[Offered]) -> list[Outcome]:
    """Sends the load, in order of time; waits until every request is answered."""
    return asyncio.run(_run(address, model, load))


async def _run(address: str, model: str, load: Sequence[Offered]) -> list[Outcome]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(NUM_CHANNELS)]
    stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]
    messages = [_message(model, item) for item in load]
    tasks = []
    start = time.perf_counter()
    for index, (item, message) in enumerate(zip(load, messages, strict=True)):
        await asyncio.sleep(max(0.0, start + item.at - time.perf_counter()))
        stub = stubs[index % NUM_CHANNELS]
        tasks.append(asyncio.create_task(_one(stub, message, item, start)))
    outcomes = list(await asyncio.wait_for(asyncio.gather(*tasks), GRACE_S)) if tasks else []
    for channel in channels:
        await channel.close()
    return outcomes


async def _one(stub: Any, message: pb.ModelInferRequest, item: Offered, start: float) -> Outcome:
    async def requests() -> Any:
        yield message

    sent = time.perf_counter()
    outcome = Outcome(item, sent - start)
    try:
        async for answer in stub.ModelStreamInfer(requests()):
            _note(outcome, answer, time.perf_counter() - sent)
    except grpc.aio.AioRpcError as error:
        outcome.error, outcome.failed_after = str(error.details()), time.perf_counter() - sent
    return outcome


def _note(outcome: Outcome, answer: pb.ModelStreamInferResponse, elapsed: float) -> None:
    if answer.error_message:
        outcome.error, outcome.failed_after = answer.error_message, elapsed
        return
    tensors = zip(answer.infer_response.outputs, answer.infer_response.raw_output_contents, strict=True)
    raw = {tensor.name: data for tensor, data in tensors}
    num_tokens = struct.unpack("<I", raw["num_output_tokens"])[0] if "num_output_tokens" in raw else 0
    if num_tokens:
        outcome.first_token = elapsed if outcome.first_token is None else outcome.first_token
        outcome.last_token = elapsed
        outcome.num_tokens += num_tokens
    reason = raw["finish_reason"][4:].decode() if "finish_reason" in raw else "None"
    outcome.finish_reason = "" if reason == "None" else reason


def _message(model: str, item: Offered) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    sampling = {"max_tokens": item.num_output_tokens, "temperature": 0, "ignore_eos": True, **item.parameters}
    ids = struct.pack(f"<{len(item.input_ids)}i", *item.input_ids)
    text = json.dumps(sampling).encode()
    _add(message, "input_ids", "INT32", len(item.input_ids), ids)
    _add(message, "sampling_parameters", "BYTES", 1, struct.pack("<I", len(text)) + text)
    for flag in ("stream", "return_num_output_tokens", "return_finish_reason"):
        _add(message, flag, "BOOL", 1, b"\x01")
    return message


def _add(message: pb.ModelInferRequest, name: str, datatype: str, size: int, raw: bytes) -> None:
    tensor = message.inputs.add()
    tensor.name, tensor.datatype = name, datatype
    tensor.shape.append(size)
    message.raw_input_contents.append(raw)
