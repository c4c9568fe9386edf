"""Load with every kind of answer: whole, cut off, refused and failed. Its clients count them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import requests

from support.faults.planted import Fault
from support.faults.service import serving
from support.triton.serving import WEIGHTS, Server, free_ports
from tidewheel.request import FinishReason, Priority
from tidewheel_client import Client, RequestError
from tidewheel_client.errors import BY_TAG

KEY = "a key for tests"
# Few rows, blocks and places to wait: the requests of a round are an overload.
SETTINGS = {
    "model": str(WEIGHTS),
    "dtype": "float32",
    "generation_config": "auto",
    "num_blocks": "40",
    "max_model_len": "512",
    "max_num_seqs": "4",
    "max_waiting_requests": "6",
    "speculation": "prompt_lookup",
    "tenants": json.dumps({"acme": {"weight": 2}, "poor": {"requests_per_s": 0.5}}).replace('"', r"\""),
}
NUM_AT_ONCE = 14
NUM_PROMPT, NUM_OUTPUT = 20, 24  # tokens
NUM_LONG_PROMPT = 280  # of which the KV cache holds two
NUM_STEPS = 20
NUM_LATE = 8
PAUSE_S = 1.0
LIMIT_S = 60.0
MAX_TTFT_MS = 600_000  # an objective that every request meets


@contextmanager
def serving_with_gateway(
    folder: Path, settings: Mapping[str, str] = SETTINGS, variables: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Serve the demo model, with faults to plant, and with a gateway that wants `KEY`."""
    (port,) = free_ports(1)
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (folder / "keys.toml").write_text(f'[[keys]]\nname = "tests"\nsha256 = "{digest}"\ntenant = "acme"\n')
    arguments = ("--openai-port", str(port), "--api-keys", str(folder / "keys.toml"))
    with serving(folder, *arguments, settings=settings, variables=variables) as server:
        server.openai_port = port
        yield server


class Ended(NamedTuple):
    reason: str
    num_prompt: int  # tokens
    num_output: int


@dataclass
class Tally:
    """What clients saw. Prompts and outputs are those of requests that ended by themselves."""

    num_sent: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    errors: Counter[str] = field(default_factory=Counter)  # by tag
    num_displaced: int = 0  # errors of requests that had waited, and made way for a better class
    answered: Counter[str] = field(default_factory=Counter)  # whole answers, by class
    num_first_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, ask: Callable[[], Ended], priority: Priority) -> None:
        """Make a request."""
        try:
            ended = ask()
        except RequestError as error:
            with self.lock:
                self.num_sent += 1
                self.errors[error.tag] += 1
                self.num_displaced += "took the place" in error.message
            return
        with self.lock:
            self.num_sent += 1
            self.finished[ended.reason] += 1
            self.answered[priority.name.lower()] += ended.reason in (FinishReason.STOP, FinishReason.LENGTH)
            self.num_first_tokens += 1
            self.num_prompt_tokens += ended.num_prompt
            self.num_output_tokens += ended.num_output


class Load:
    """Rounds of requests to a server, each of which ends before the next one."""

    def __init__(self, server: Server) -> None:
        self.tally = Tally()
        self._server = server
        self._num_long = 0

    def overload(self) -> None:
        """Send more at once than run and wait, of every class and of several tenants."""
        self._at_once([partial(self._stream, number) for number in range(NUM_AT_ONCE)])

    def fill_cache(self) -> None:
        """Let requests wait for blocks while rows are free, and then send more than may wait."""
        with Client(self._server.grpc, timeout_s=LIMIT_S) as client, contextlib.suppress(RequestError):
            options: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "priority": 1}
            with contextlib.ExitStack() as open_streams:
                first, *_ = [
                    open_streams.enter_context(client.stream(input_ids=self._long_prompt(), **options))
                    for _ in range(3)  # the cache holds two
                ]
                for _ in range(NUM_STEPS):  # in which the third one was looked at
                    next(first)
                self._at_once([self._send_long] * NUM_LATE)

    def mishaps(self) -> None:
        """Cancel, miss a deadline, ask for nonsense, use a wrong key, and fail."""
        self._at_once([self._cancel, self._miss_deadline, self._ask_for_nonsense, self._fail, self._use_gateway])

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Send rounds inside the block, with pauses that leave a processor to others."""
        is_over = threading.Event()

        def keep_on() -> None:
            while not is_over.wait(PAUSE_S):
                self.overload()
                self.fill_cache()
                self.mishaps()

        thread = threading.Thread(target=keep_on)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _at_once(self, each: list[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=one) for one in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _generate(self, priority: Priority, prompt: list[int], stream: bool = True, **params: Any) -> None:
        def ask() -> Ended:
            with Client(self._server.grpc, timeout_s=LIMIT_S) as client:
                options: dict[str, Any] = {
                    "return_token_ids": True,
                    "ignore_eos": True,
                    "priority": priority.value,
                    **params,
                }
                answer = (
                    client.stream(input_ids=prompt, **options).read()
                    if stream
                    else client.generate(input_ids=prompt, **options)
                )
            return Ended(answer.finish_reason, len(prompt), len(answer.token_ids or ()))

        self.tally.count(ask, priority)

    def _stream(self, number: int) -> None:
        prompt = [100 + number] * NUM_PROMPT
        tenant = ("acme", "poor", "unknown")[number % 3]
        options = {"max_tokens": NUM_OUTPUT, "tenant": tenant, "ttft_ms": MAX_TTFT_MS}
        self._generate(Priority(1 + number % 4), prompt, **options)

    def _long_prompt(self) -> list[int]:
        """Return a prompt that is not in the cache."""
        self._num_long += 1
        return [self._num_long % 1000] * NUM_LONG_PROMPT

    def _send_long(self) -> None:
        self._generate(Priority.NORMAL, self._long_prompt(), max_tokens=2)

    def _cancel(self) -> None:
        def ask() -> Ended:
            with (
                Client(self._server.grpc, timeout_s=LIMIT_S) as client,
                client.stream("The server", max_tokens=900, ignore_eos=True, priority=1) as stream,
            ):
                next(stream)
            return Ended(FinishReason.CANCELLED, 0, 0)

        self.tally.count(ask, Priority.CRITICAL)

    def _miss_deadline(self) -> None:
        """Take twice the deadline each time, until a token comes before it: a busy machine starts late."""
        before = self.tally.finished[FinishReason.DEADLINE]
        for deadline_ms in (60, 120, 240, 480, 960):
            self._generate(Priority.CRITICAL, [50] * NUM_PROMPT, max_tokens=900, deadline_ms=deadline_ms)
            if self.tally.finished[FinishReason.DEADLINE] > before:
                break
        self._generate(Priority.CRITICAL, [50] * NUM_PROMPT, max_tokens=900, deadline_ms=1)

    def _ask_for_nonsense(self) -> None:
        self._generate(Priority.NORMAL, [], max_tokens=4)
        self._generate(Priority.NORMAL, [50] * NUM_PROMPT, top_p=7.0)

    def _fail(self) -> None:
        self._generate(Priority.CRITICAL, Fault.NOT_FINITE.prompt(after=0), stream=False, max_tokens=4)

    def _use_gateway(self) -> None:
        body: dict[str, Any] = {
            "model": "demo",
            "prompt": [60] * NUM_PROMPT,
            "max_tokens": 4,
            "priority": 1,
            "ignore_eos": True,
        }
        url = f"{self._server.openai}/v1/completions"
        assert requests.post(url, json=body, timeout=LIMIT_S).status_code == 401
        self.tally.errors["TW-KEY"] += 1

        def ask() -> Ended:
            answer = requests.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=LIMIT_S).json()
            if "error" in answer:
                raise BY_TAG[answer["error"]["tag"]](answer["error"]["message"])
            return Ended(answer["choices"][0]["finish_reason"], NUM_PROMPT, answer["usage"]["completion_tokens"])

        self.tally.count(ask, Priority.CRITICAL)
