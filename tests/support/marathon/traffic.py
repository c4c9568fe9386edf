"""Clients of a marathon: an open loop of mixed requests, and canaries that a client sends again."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp

from support.faults.nothing_lost import CANARIES
from support.marathon.ledger import Call
from support.triton.burst import GREEDY
from support.triton.serving import Server
from tidewheel.bench.driver import RunProgress
from tidewheel.bench.outcome import OfferedRequest, RequestFailed, RequestOutcome
from tidewheel.bench.transports.triton_grpc import TritonGrpcTransport
from tidewheel.workload.arrivals import poisson_until
from tidewheel_client import Client, RequestError, RequestTimeout, ServerUnavailable
from tidewheel_client.errors import from_text

PROMPTS = (*CANARIES, *(" ".join([text] * 12) for text in CANARIES))
MAX_TOKENS = 120
WAYS = {"grpc": 0.5, "http": 0.35, "twin": 0.15}
CLASSES = {1: 0.1, 2: 0.2, 3: 0.4, 4: 0.3}
TENANTS = ("north", "south", "west")
CANCELLED_SHARE = 0.1
CANCELLED = "cancelled by its client"
CANARY_WAYS = ("client", "http", "twin")
CANARY_TOKENS = 16
CANARIES_PER_S = 3.0
PATIENCE_S = 20.0  # of a canary's client, in which it sends again what may be sent again
FIRST_RETRY_S, LONGEST_RETRY_S = 0.25, 2.0

Reference = Mapping[str, Sequence[int]]  # greedy tokens by prompt


@dataclass(frozen=True, slots=True)
class Ask(OfferedRequest):
    prompt: str = ""
    way: str = "grpc"
    cancel_after_s: float | None = None


def asks(prompt_ids: Mapping[str, list[int]], rate: float, seconds: float, seed: int) -> Iterator[Ask]:
    """Yield requests of all classes, tenants and ways, at the times of a Poisson process."""
    rng = random.Random(seed)
    for at in poisson_until(seconds, rate, random.Random(seed)):
        prompt, way = rng.choice(PROMPTS), _drawn(rng, WAYS)
        is_cancelled = way != "twin" and rng.random() < CANCELLED_SHARE / (1 - WAYS["twin"])
        yield Ask(
            at=at,
            input_ids=prompt_ids[prompt],
            num_output_tokens=rng.randint(4, MAX_TOKENS),
            parameters={
                "repetition_penalty": 1.0,
                "priority": _drawn(rng, CLASSES),
                "tenant": rng.choice(TENANTS),
            },
            prompt=prompt,
            way=way,
            cancel_after_s=rng.uniform(0.0, 1.0) if is_cancelled else None,
        )


def _drawn(rng: random.Random, shares: Mapping[Any, float]) -> Any:
    return rng.choices(list(shares), list(shares.values()))[0]


class Traffic:
    """Transport of `tidewheel bench` for `Ask`s: gRPC with ids, HTTP with text, and the twin."""

    can_cancel = True

    def __init__(self, server: Server) -> None:
        self._server = server
        self._grpc = TritonGrpcTransport(server.grpc, "demo", with_ids=True)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        await self._grpc.open()
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)

    async def close(self) -> None:
        await self._grpc.close()
        if self._session is not None:
            await self._session.close()

    async def send(self, offered: OfferedRequest, input_ids: Sequence[int], outcome: RequestOutcome) -> None:
        assert isinstance(offered, Ask)
        try:
            async with asyncio.timeout(offered.cancel_after_s):
                if offered.way == "grpc":
                    await self._grpc.send(offered, input_ids, outcome)
                else:
                    await self._send_text(offered, outcome)
        except TimeoutError:
            outcome.finish(CANCELLED)
        if not outcome.finish_reason:
            raise RequestFailed("TRUNCATED", "the answer ended without a finish reason")

    async def _send_text(self, ask: Ask, outcome: RequestOutcome) -> None:
        assert self._session is not None
        is_stream = ask.way != "twin"
        path = "demo/generate_stream" if is_stream else "demo_infer/generate"
        flags = {"stream": is_stream, "return_token_ids": True, "return_finish_reason": True}
        body = {**ask.sampling, **flags, "text_input": ask.prompt}
        try:
            async with self._session.post(f"{self._server.http}/v2/models/{path}", json=body) as answer:
                if answer.status != 200:
                    raise RequestFailed(f"HTTP {answer.status}", await answer.text(errors="replace"))
                async for line in answer.content:
                    if line.strip():
                        _note(json.loads(line.removeprefix(b"data:")), outcome)
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed("CONNECTION", str(error) or type(error).__name__) from None


def _note(answer: Mapping[str, Any], outcome: RequestOutcome) -> None:
    if "error" in answer:
        raise RequestFailed("ERROR", str(answer["error"]))
    found = answer.get("token_ids", [])
    tokens = found if isinstance(found, list) else [found]
    outcome.add_tokens(len(tokens))
    outcome.token_ids += tokens
    reason = answer["finish_reason"]
    outcome.finish_reason = "" if reason == "None" else str(reason)


def call_of(outcome: RequestOutcome, reference: Reference) -> Call:
    ask = outcome.offered
    assert isinstance(ask, Ask) and outcome.ended is not None
    is_cut = bool(outcome.error) or outcome.finish_reason == CANCELLED
    is_right = _begins(reference[ask.prompt], outcome.token_ids)
    return Call(
        way=ask.way,
        sent=outcome.sent,
        ended=outcome.sent + outcome.ended,
        error=outcome.code,
        first_error=outcome.code,
        first_token=outcome.first_token,
        num_tokens=outcome.num_tokens,
        has_right_tokens=is_right and (is_cut or len(outcome.token_ids) == ask.num_output_tokens),
    )


def _begins(reference: Sequence[int], tokens: Sequence[int]) -> bool:
    return list(reference[: len(tokens)]) == list(tokens)


class Canaries:
    """Greedy requests of the highest class at a steady rate, by each way in turn."""

    def __init__(self, server: Server, traffic: Traffic, reference: Reference, progress: RunProgress) -> None:
        self._client = Client(server.grpc, "demo")
        self._pool = ThreadPoolExecutor(int(2 * PATIENCE_S * CANARIES_PER_S))
        self._traffic = traffic
        self._reference = reference
        self._progress = progress
        self.calls: list[Call] = []

    async def run(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(seconds * CANARIES_PER_S)):
                await asyncio.sleep(max(0.0, number / CANARIES_PER_S - self._progress.now()))
                tasks.create_task(self._one(number))

    def close(self) -> None:
        self._client.close()
        self._pool.shutdown()

    def are_good_since(self, at: float) -> bool:
        """Return whether the last of each way was sent after then, and was answered at once."""
        last = self.calls[-len(CANARY_WAYS) :]
        ways = {call.way for call in last if call.sent >= at and not call.first_error}
        return len(ways) == len(CANARY_WAYS)

    async def _one(self, number: int) -> None:
        prompt, way = CANARIES[number % len(CANARIES)], CANARY_WAYS[number % len(CANARY_WAYS)]
        sent, delay_s = self._progress.now(), FIRST_RETRY_S
        codes: list[str] = []
        tokens: list[int] = []
        while True:
            left_s = sent + PATIENCE_S - self._progress.now()
            try:
                tokens = await self._ask(way, prompt, left_s)
                codes.append("")
                break
            except RequestError as error:
                codes.append(error.tag or type(error).__name__)
                wait_s = max(delay_s, (error.retry_after_ms or 0) * 1e-3)
                if not error.retryable or wait_s >= left_s:
                    break
            await asyncio.sleep(wait_s)
            delay_s = min(2 * delay_s, LONGEST_RETRY_S)
        is_right = bool(codes[-1]) or tokens == list(self._reference[prompt][:CANARY_TOKENS])
        ended = self._progress.now()
        self.calls.append(Call(way, sent, ended, True, codes[-1], codes[0], None, len(tokens), is_right))

    async def _ask(self, way: str, prompt: str, limit_s: float) -> list[int]:
        """Return the tokens. Raise `RequestError`."""
        if way == "client":
            parameters = {**GREEDY, "max_tokens": CANARY_TOKENS, "priority": 1, "return_token_ids": True}
            stream = functools.partial(self._client.stream, prompt, timeout_s=limit_s, **parameters)
            answer = await asyncio.get_running_loop().run_in_executor(self._pool, lambda: stream().read())
            return list(answer.token_ids or ())
        parameters = {"repetition_penalty": 1.0, "priority": 1}
        ask = Ask(0.0, [], CANARY_TOKENS, parameters, prompt=prompt, way=way)
        outcome = RequestOutcome(ask, 0.0)
        try:
            async with asyncio.timeout(limit_s):
                await self._traffic.send(ask, [], outcome)
        except TimeoutError:
            raise RequestTimeout("no answer in time") from None
        except RequestFailed as error:
            known = ServerUnavailable if error.code == "CONNECTION" else from_text
            raise known(error.message) from None
        return outcome.token_ids
