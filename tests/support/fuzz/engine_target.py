"""An engine over a fake device, which gets messages of one front end while it answers another."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from support.engine.engine_clients import request
from support.engine.fake_engine import make_info
from support.engine.fake_runner import VOCAB_SIZE, FakeRunner, naive_output
from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import make_config, make_request
from tidewheel.config import EngineConfig
from tidewheel.engine.messages import (
    PROTOCOL,
    Deltas,
    FromEngine,
    Goodbye,
    Hello,
    Message,
    encoder,
    from_engine_decoder,
)
from tidewheel.engine.server import EngineServer
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.request import Request
from tidewheel.scheduler.scheduler import Scheduler

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 64, 4, 90
MAX_TURNS, MAX_PAYLOADS = 1000, 64
PROMPT = [5, 6, 7]
SECRET_PID = 1 << 40  # unknown to the fuzzer, which as an operator may cancel the requests of others


class _Socket:
    """A ROUTER socket, of which each end is a list."""

    def __init__(self) -> None:
        self.arriving: deque[list[bytes]] = deque()
        self.sent: list[tuple[bytes, FromEngine]] = []

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.arriving:
            raise zmq.Again
        return self.arriving.popleft()

    def send_multipart(self, parts: list[bytes], flags: int) -> None:
        self.sent.append((parts[0], from_engine_decoder.decode(parts[1])))

    def poll(self, timeout_ms: int) -> int:
        return 0


class _Scheduler(Scheduler):
    def __init__(self) -> None:
        config = make_config(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN)
        super().__init__(config, KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True))
        self.salts: dict[str, str] = {}

    def add_group(self, requests: Sequence[Request], now: float) -> list[Request]:
        self.salts |= {each.request_id: each.cache_salt for each in requests}
        return super().add_group(requests, now)


def serve_messages(payloads: Iterable[bytes]) -> None:
    """Serve until nothing is left. The other front end gets its tokens, and all blocks come back."""
    socket: Any = _Socket()
    scheduler = _Scheduler()
    runner = FakeRunner(
        num_rows=8, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, token_budget=64, salt_of=scheduler.salts.__getitem__
    )
    ticks = itertools.count()
    info = make_info(Path("m"), vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, num_blocks=NUM_BLOCKS)
    info = msgspec.structs.replace(info, pid=SECRET_PID)
    server = EngineServer(
        socket,
        scheduler,
        runner,
        info,
        config=EngineConfig(model="m", debug_invariants=True),
        clock=lambda: 1e-3 * next(ticks),
    )
    server.linger_s = 1e9
    socket.arriving += [[b"neighbour", _encode(Hello(PROTOCOL, "neighbour", ""))]]
    socket.arriving += [[b"neighbour", _encode(request(1, *PROMPT, max_tokens=12))]]
    socket.arriving += [[b"fuzzer", _encode(Hello(PROTOCOL, "fuzzer", ""))]]
    socket.arriving += [[b"fuzzer", payload] for payload in itertools.islice(payloads, MAX_PAYLOADS)]
    socket.arriving += [[b"fuzzer", _encode(Goodbye())]]
    _run(server, scheduler)
    assert _tokens(socket.sent, b"neighbour") == naive_output(make_request(prompt=PROMPT, max_tokens=12))[0]


def _run(server: EngineServer, scheduler: Scheduler) -> None:
    turns = itertools.count()

    def keep_house(_: object) -> str:
        assert next(turns) < MAX_TURNS, "the engine does not come to an end"
        server._front_ends.broadcast(server._figures())
        return "" if server.socket.arriving or server._core.has_unfinished else "all is done"

    server._maintain = keep_house  # type: ignore[method-assign]
    assert server.serve(lambda: "")
    check_invariants(scheduler)


def _tokens(sent: Iterable[tuple[bytes, FromEngine]], identity: bytes) -> list[int]:
    messages = [message for to, message in sent if to == identity and isinstance(message, Deltas)]
    columns = [tokens.arrays()[1].tolist() for message in messages for tokens in message.tokens]
    return [
        *itertools.chain(*columns),
        *(token for one in messages for delta in one.deltas for token in delta.token_ids),
    ]


def _encode(message: Message) -> bytes:
    return encoder.encode(message)
