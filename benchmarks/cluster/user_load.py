"""Requests through a gateway's OpenAI API, one after the other for each of many users, and what became of each."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from modelled.device import BLOCK_SIZE, VOCAB_SIZE

FIRST_ID = 4  # below are special tokens
CONNECT_S = 5.0


@dataclass(slots=True)
class Outcome:
    """Moments are of `time.monotonic`."""

    num_expected: int  # tokens
    turn: int = 0  # of its conversation
    num_cachable: int = 0  # tokens, in whole blocks, that the turn before left in a cache
    sent: float = field(default_factory=time.monotonic)
    first: float = 0.0  # 0: no token came
    ended: float = 0.0
    num_tokens: int = 0
    num_cached: int = 0  # tokens of the prompt
    error: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.error and self.num_tokens == self.num_expected

    @property
    def found_its_cache(self) -> bool:
        return self.num_cached >= self.num_cachable


class Users:
    """Conversations, whose turns add to the prompt: one after the other for each user, or one turn at given times."""

    def __init__(self, gateway: str, model: str, *, turns: int, prompt_tokens: int, answer_tokens: int) -> None:
        self._url = f"http://{gateway}/v1/completions"
        self._model = model
        self._turns, self._prompt_tokens, self._answer_tokens = turns, prompt_tokens, answer_tokens
        self._names = itertools.count()
        self._random = random.Random(0)
        self._is_ending = False
        self.outcomes: list[Outcome] = []

    @asynccontextmanager
    async def active(self, count: int) -> AsyncIterator[None]:
        """Ask while the block runs; at its end let all requests end."""
        async with _session() as session, asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._converse_on(session))
            yield
            self._is_ending = True

    async def offer(self, arrivals: Sequence[float]) -> None:
        """Send a first turn at each of the times, in seconds from now, and let all requests end."""
        begin, self._is_ending = time.monotonic(), True
        async with _session() as session, asyncio.TaskGroup() as group:
            for arrival in arrivals:
                await asyncio.sleep(begin + arrival - time.monotonic())
                group.create_task(self._converse(session))

    async def _converse_on(self, session: aiohttp.ClientSession) -> None:
        while not self._is_ending:
            await self._converse(session)

    async def _converse(self, session: aiohttp.ClientSession) -> None:
        name, said = f"session-{next(self._names)}", list[int]()
        for turn in range(self._turns):
            prompt = [*said, *(self._random.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(self._prompt_tokens))]
            outcome = Outcome(self._answer_tokens, turn, len(said) // BLOCK_SIZE * BLOCK_SIZE if turn else 0)
            self.outcomes.append(outcome)
            await self._ask(session, self._body(name, prompt), outcome)
            said = prompt
            if self._is_ending or outcome.error:
                break

    def _body(self, name: str, prompt: list[int]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": self._answer_tokens}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return body | ({"session_id": name} if self._turns > 1 else {})

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any], outcome: Outcome) -> None:
        try:
            async with session.post(self._url, json=body) as answer:
                if answer.status != 200:
                    outcome.error = _words(await answer.read())
                async for line in answer.content:
                    _read(line, outcome)
        except (aiohttp.ClientError, OSError) as error:
            outcome.error = str(error) or type(error).__name__
        outcome.ended = time.monotonic()


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


def _read(line: bytes, outcome: Outcome) -> None:
    """Take in a line of a stream."""
    data = line.removeprefix(b"data: ").strip()
    if not line.startswith(b"data: ") or data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        outcome.error = _words(data)
    if any(choice["text"] for choice in event.get("choices", ())) and not outcome.first:
        outcome.first = time.monotonic()
    if usage := event.get("usage"):
        outcome.num_tokens = usage["completion_tokens"]
        outcome.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _words(data: bytes) -> str:
    """Return tag and message of an error."""
    error = json.loads(data)["error"]
    return f"[{error.get('tag')}] {error['message']}"


def later_turns(outcomes: list[Outcome]) -> Iterator[Outcome]:
    """Yield those that a cache could help."""
    return (outcome for outcome in outcomes if outcome.num_cachable and outcome.is_whole)


def percent(outcomes: list[Outcome]) -> float:
    """Return how many later turns found what the turn before left."""
    found = [outcome.found_its_cache for outcome in later_turns(outcomes)]
    return round(100 * sum(found) / max(len(found), 1), 2)
