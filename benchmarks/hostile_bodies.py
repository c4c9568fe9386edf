"""Gaps between the tokens of 16 normal streams through the gateway, while a client sends it hostile bodies.

    python benchmarks/hostile_bodies.py --save

Each body is sent again and again, 50 ms after its answer: a flood of requests is what limits of API keys are for. The
goal is that no token comes more than 50 ms later than the latest one without them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import select
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import requests

from serving import free_ports, served
from study import ROOT, Study, show

WEIGHTS = ROOT / "model_repository" / "demo" / "1" / "weights"
GOAL_MS = 50.0
NUM_STREAMS = 16
PAUSE_S = 0.05
MIB = 1 << 20
PATH = "/v1/completions"
STREAM = {"prompt": "The Python interpreter is", "stream": True, "max_tokens": 900, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {key: {} for key in "abcdefgh"}}}}


def bodies() -> dict[str, tuple[str, bytes]]:
    """Return path and body by name."""
    chat = "/v1/chat/completions"
    unknown = {
        number: json.dumps({"prompt": "x", **{f"k{i}": i for i in range(number)}}) for number in (5000, 500_000)
    }
    return {
        "nested 8,000,000 deep": (PATH, b'{"prompt": ' + b"[" * 8_000_000 + b"}"),
        "nested 900 deep, 8,000 times": (PATH, b'{"x": [' + b",".join([b"[" * 900 + b"]" * 900] * 8000) + b"]}"),
        "5,000,000 empty lists": (PATH, b'{"prompt": [' + b"[]," * 5_000_000 + b"[]]}"),
        "5,000,000 empty messages": (chat, b'{"messages": [' + b"{}," * 5_000_000 + b"{}]}"),
        "7,000,000 token ids": (PATH, b'{"prompt": [' + b"1," * 7_000_000 + b"1]}"),
        "200,000 token ids": (PATH, b'{"prompt": [' + b"1," * 200_000 + b"1]}"),
        "a number of 15 MB": (PATH, b'{"prompt": "x", "seed": ' + b"9" * (15 * MIB) + b"}"),
        "a key of 10 MB": (PATH, b'{"prompt": "x", "' + b"k" * (10 * MIB) + b'": 1}'),
        "a prompt of 10 MB": (PATH, b'{"prompt": "' + b"a" * (10 * MIB) + b'"}'),
        "escapes of 10 MB": (PATH, b'{"prompt": "' + b"\\u00e9" * (10 * MIB // 6) + b'"}'),
        "10,000,000 commas in a text": (PATH, b'{"prompt": "' + b",[" * 5_000_000 + b'"}'),
        "bad UTF-8 behind 10 MB": (PATH, b'{"prompt": "' + b"a" * (10 * MIB) + b'\xff"}'),
        "5,000 unknown fields": (PATH, unknown[5000].encode()),
        "500,000 unknown fields": (PATH, unknown[500_000].encode()),
        "5,000 tools": (chat, json.dumps({**CHAT, "tools": [TOOL] * 5000}).encode()),
        "100 tools": (chat, json.dumps({**CHAT, "tools": [TOOL] * 100}).encode()),
    }


def main() -> None:
    study = Study("hostile_bodies", __doc__, "aiohttp", "msgspec", "tritonclient")
    study.add_argument("--seconds", type=float, default=3.0, help="of each case (default: %(default)g)")
    study.add_argument("--only", default="", metavar="TEXT", help="cases whose name has the text")
    options = study.begin()
    port = free_ports(1)
    rows = []
    cases = {name: body for name, body in bodies().items() if options.only in name}
    arguments = ["--openai-port", str(port)]
    with served(WEIGHTS, {}, ports=free_ports(4), arguments=arguments), _streams(port) as streams:
        _gaps(streams, 2.0)  # warm
        before = _row("none", _gaps(streams, 2 * options.seconds), Counter())
        for name, (path, body) in cases.items():
            with _attack(port, path, body) as answers:
                gaps = _gaps(streams, options.seconds)
                answers.send(None)
                rows.append(_row(name, gaps, answers.recv()))
    for row in rows:
        row["later"] = round(row["max"] - before["max"], 1)
    show([{**before, "later": ""}, *rows])
    worst = max(row["later"] for row in rows)
    print(f"at most {worst:g} ms later; the goal is {GOAL_MS:g} ms")
    study.save({"goal_ms": GOAL_MS, "worst_ms": worst, "rows": [before, *rows]})


def _row(name: str, gaps_ms: list[float], answers: Counter[int]) -> dict[str, Any]:
    cuts = statistics.quantiles(gaps_ms, n=1000)
    return {
        "bodies": name,
        "answers": " ".join(f"{count} x {status}" for status, count in sorted(answers.items())),
        "p50": round(cuts[499], 1),
        "p99": round(cuts[989], 1),
        "max": round(max(gaps_ms), 1),
    }


# --- streams --------------------------------------------------------------------------------------------------------


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextlib.contextmanager
def _streams(port: int) -> Iterator[list[socket.socket]]:
    while not requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok:
        time.sleep(0.1)
    with contextlib.ExitStack() as held:
        request = _request(PATH, json.dumps(STREAM).encode())
        streams = []
        for _ in range(NUM_STREAMS):
            streams.append(held.enter_context(socket.create_connection(("127.0.0.1", port))))
            streams[-1].sendall(request)
        yield streams


def _gaps(streams: list[socket.socket], seconds: float) -> list[float]:
    """Return milliseconds between the arrivals of each stream. One that ends begins again."""
    request, gaps = _request(PATH, json.dumps(STREAM).encode()), []
    last: dict[socket.socket, float] = {}
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        ready, _, _ = select.select(streams, [], [], 1.0)
        for stream in ready:
            now, data = time.monotonic(), stream.recv(1 << 16)
            if not data or b'"error"' in data:
                raise RuntimeError(f"a stream was broken: {data!r}")
            if stream in last:
                gaps.append(1e3 * (now - last[stream]))
            last[stream] = now
            if data.endswith(b"0\r\n\r\n"):
                stream.sendall(request)
                del last[stream]  # the time to a first token is no gap
    return gaps


# --- attacks --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _attack(port: int, path: str, body: bytes) -> Iterator[Connection]:
    """Send the body until a message comes; answer it with the counts of statuses."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_send_all, args=(port, path, body, theirs))
    process.start()
    try:
        yield ours
    finally:
        process.join(10)
        process.kill()


def _send_all(port: int, path: str, body: bytes, told: Connection) -> None:
    request, statuses = _request(path, body), Counter[int]()
    while not told.poll():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(request)
            answer = connection.recv(1 << 16)
            statuses[int(answer.split(b" ", 2)[1])] += 1
        time.sleep(PAUSE_S)
    told.send(statuses)


if __name__ == "__main__":
    main()
