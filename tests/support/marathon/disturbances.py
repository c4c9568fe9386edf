"""Faults of a marathon, and the order in which they come."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import requests
import tritonclient.grpc as grpcclient

from support.faults.nothing_lost import CANARIES
from support.faults.own_mounts import OwnMount
from support.faults.raw_streams import RawStream
from support.marathon.ledger import RECOVERY_LIMIT_S, Fault
from support.marathon.traffic import Canaries, Reference
from support.triton.serving import Server
from tidewheel.bench.driver import RunProgress

HOLD_S = (1.0, 8.0)  # of a pause, a full disk and a small /dev/shm
GAP_S = (6.0, 14.0)  # from a recovery to the next fault
LETHAL_GAP_S = 16.0  # to one that ends a process: five deaths in a minute of service are a crash loop
FIND_LIMIT_S = 10.0
POLL_S = 0.1
NUM_CLIENTS = 16
LONG = 600  # tokens
STUB = "triton_python_backend_stub"
BAD_BODIES = (
    b"{",
    b'{"text_input": "x", "max_tokens": -1}',
    b'{"text_input": "x", "sampling_parameters": "{\\"temperature\\": -1}"}',
    b'{"text_input": "x", "sampling_parameters": "{\\"stop\\": [\\"\\"]}"}',
    b'{"text_input": "x", "unknown": 1}',
    b'{"text_input": "x", "priority": 9}',
    b'{"input_ids": [0, 99999]}',
    b'{"text_input": "' + b"x" * (4 << 20) + b'"}',
)


@dataclass(frozen=True, slots=True)
class Target:
    server: Server
    reference: Reference
    disk: OwnMount  # run folder and log
    shared_memory: OwnMount


class Kind(NamedTuple):
    make: Callable[[Target, float], None]  # with the seconds to hold it
    opens_window: bool = True
    is_lethal: bool = False
    needs_mounts: bool = False


def _process(target: Target, *words: str) -> psutil.Process:
    """Return the one with all these words in its command."""
    deadline = time.monotonic() + FIND_LIMIT_S
    while time.monotonic() < deadline:
        for process in target.server.processes(words[0]):
            with contextlib.suppress(psutil.Error):
                if all(word in " ".join(process.cmdline()) for word in words):
                    return process
        time.sleep(POLL_S)
    raise LookupError(f"no process {' '.join(words)}")


def _kill(*words: str) -> Callable[[Target, float], None]:
    return lambda target, _: _process(target, *words).kill()


def _pause(*words: str) -> Callable[[Target, float], None]:
    def pause(target: Target, hold_s: float) -> None:
        _hold(_process(target, *words), hold_s)

    return pause


def _hold(process: psutil.Process, hold_s: float) -> None:
    process.suspend()
    time.sleep(hold_s)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def _pause_serve(target: Target, hold_s: float) -> None:
    _hold(psutil.Process(target.server.process.pid), hold_s)


def _fill_disk(target: Target, hold_s: float) -> None:
    with _full(target.disk):
        time.sleep(hold_s)


def _kill_engine_on_full_disk(target: Target, hold_s: float) -> None:
    with _full(target.disk):
        _kill(ENGINE)(target, hold_s)
        time.sleep(hold_s)


def _fill_shared_memory(target: Target, hold_s: float) -> None:
    with _full(target.shared_memory):
        time.sleep(hold_s)


@contextlib.contextmanager
def _full(mount: OwnMount) -> Iterator[None]:
    mount.fill()
    try:
        yield
    finally:
        mount.free()


def _reset_streams(target: Target, _: float) -> None:
    """Reset connections at once, and after the first token."""
    for end in (RawStream.reset, RawStream.reset_after_first):
        for stream in [RawStream(target.server, CANARIES[0], LONG) for _ in range(NUM_CLIENTS)]:
            end(stream)


def _leave_unread(target: Target, hold_s: float) -> None:
    prompts = [CANARIES[index % len(CANARIES)] for index in range(NUM_CLIENTS)]
    streams = [RawStream(target.server, prompt, 100) for prompt in prompts]
    time.sleep(hold_s)
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.finish() == list(target.reference[prompt][:100]), "an unread stream has other tokens"


def _send_bad_requests(target: Target, _: float) -> None:
    for body in BAD_BODIES * 4:
        answer = requests.post(f"{target.server.http}/v2/models/demo/generate", data=body, timeout=60)
        assert 400 <= answer.status_code < 500 or body == b"{", (
            f"{body[:60]!r}: {answer.status_code} {answer.text[:200]}"
        )


def _reload(target: Target, _: float) -> None:
    """Load the model with another number of blocks, which takes another engine."""
    path = target.server.log.parent / "repository" / "demo" / "config.pbtxt"
    numbers = ('"160"', '"168"')
    old, new = numbers if numbers[0] in path.read_text() else reversed(numbers)
    path.write_text(path.read_text().replace(old, new))
    # Over HTTP, Triton would let all connections wait that share the thread of this one.
    with grpcclient.InferenceServerClient(target.server.grpc) as client:
        client.load_model("demo")


ENGINE, PROMPTS, GUARD = "--engine-dir", "tidewheel.frontend.prompt_workers", "tidewheel.server.workdir"
TRITON = "bin/tritonserver"
KINDS: dict[str, Kind] = {
    "engine killed": Kind(_kill(ENGINE), is_lethal=True),
    "engine paused": Kind(_pause(ENGINE)),
    "front end killed": Kind(_kill(STUB, "/demo/"), is_lethal=True),
    "front end paused": Kind(_pause(STUB, "/demo/"), is_lethal=True),
    "twin killed": Kind(_kill(STUB, "/demo_infer/"), is_lethal=True),
    "twin paused": Kind(_pause(STUB, "/demo_infer/"), is_lethal=True),
    "tritonserver killed": Kind(_kill(TRITON), is_lethal=True),
    "tritonserver paused": Kind(_pause(TRITON)),
    "prompt process killed": Kind(_kill(PROMPTS)),
    "prompt process paused": Kind(_pause(PROMPTS)),
    "guard paused": Kind(_pause(GUARD)),
    "serve paused": Kind(_pause_serve),
    "disk full": Kind(_fill_disk, needs_mounts=True),
    "engine killed on a full disk": Kind(_kill_engine_on_full_disk, is_lethal=True, needs_mounts=True),
    "shared memory full": Kind(_fill_shared_memory, is_lethal=True, needs_mounts=True),
    "connections reset": Kind(_reset_streams, opens_window=False),
    "streams unread": Kind(_leave_unread, opens_window=False),
    "bad requests": Kind(_send_bad_requests, opens_window=False),
    "reload": Kind(_reload, opens_window=False),
}


def order(names: list[str], seed: int) -> Iterator[tuple[str, float, float]]:
    """Yield kinds without end, each once in a round, with the seconds to wait and to hold."""
    rng = random.Random(seed)
    while names:
        for name in rng.sample(names, len(names)):
            yield name, rng.uniform(*GAP_S), rng.uniform(*HOLD_S)


class Disturber:
    def __init__(self, target: Target, canaries: Canaries, progress: RunProgress) -> None:
        self._target = target
        self._canaries = canaries
        self._now = progress.now
        self.faults: list[Fault] = []

    async def run(self, names: list[str], seconds: float, seed: int) -> None:
        """Make one fault after the other, so that the last has recovered at the end."""
        for name, gap_s, hold_s in order(names, seed):
            kind = KINDS[name]
            gap_s = max(gap_s, LETHAL_GAP_S) if kind.is_lethal else gap_s
            if self._now() + gap_s + HOLD_S[1] + RECOVERY_LIMIT_S > seconds:
                return
            await asyncio.sleep(gap_s)
            await self._make(name, kind, hold_s)

    async def _make(self, name: str, kind: Kind, hold_s: float) -> None:
        fault = Fault(name, self._now(), opens_window=kind.opens_window)
        self.faults.append(fault)
        try:
            await asyncio.to_thread(kind.make, self._target, hold_s)
        except Exception as error:
            fault.surprise = f"{type(error).__name__}: {error}"
        fault.ended = self._now()
        fault.recovered = await self._recovery(fault.ended)
        print(f"{fault.began:6.0f} s  {name}: recovery {fault.recovery_s:.1f} s  {fault.surprise}", flush=True)

    async def _recovery(self, since: float) -> float:
        while not await asyncio.to_thread(self._has_recovered, since):
            if self._now() > since + RECOVERY_LIMIT_S:
                return math.inf
            await asyncio.sleep(POLL_S)
        return self._now()

    def _has_recovered(self, since: float) -> bool:
        """Return whether the server is ready and each kind of canary, sent since then, was answered at once."""
        try:
            return self._canaries.are_good_since(since) and self._target.server.readiness()[0] == 200
        except requests.RequestException:
            return False
