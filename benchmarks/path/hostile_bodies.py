"""Gaps between the tokens of 16 normal streams through the gateway, while clients send it hostile bodies.

    python benchmarks hostile_bodies --save
    python benchmarks hostile_bodies --flood 10000 --save

Each body is sent again and again, 50 ms after its answer: a flood of requests is what limits of API keys are for. In
turn with it, an ordinary body is sent at the same pace. The goal is that no token comes more than 50 ms later than
beside ordinary bodies, by the latest token of the median turn. The largest bodies are as large as the gateway takes
by default. With `--flood`, eight clients send so many grammars, all different, as fast as they are answered, in turn
with the same requests without grammars.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import select
import socket
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil

from common.serving import HTTP, free_ports, served
from common.study import ROOT, Study, in_turns, show
from engine.structured_output import hostile_grammars, record
from tidewheel.gateway import MAX_BODY_MB

WEIGHTS = ROOT / "model_repository" / "demo" / "1" / "weights"
GOAL_MS = 50.0
NUM_STREAMS = 16
PAUSE_S = 0.05
TURN_S = 0.6
NUM_FLOODING = 8  # clients
PER_TURN = {"ordinary": 500, "hostile": 2000}  # requests of a flood
CAP = MAX_BODY_MB << 20
PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
STREAM = {"prompt": "The Python interpreter is", "stream": True, "max_tokens": 900, "ignore_eos": True}
ASK = {"prompt": "x", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {key: {} for key in "abcdefgh"}}}}

Body = tuple[str, bytes]  # path and content


def filled(before: bytes, unit: bytes, after: bytes = b"}") -> bytes:
    """Repeat the unit up to the gateway's cap."""
    return before + unit * ((CAP - len(before) - len(after)) // len(unit)) + after


def bodies() -> dict[str, Body]:
    prompt, end = b'{"prompt": "', b'"}'
    fields = json.dumps({"prompt": "x", **{f"k{i}": i for i in range(5000)}})
    return {
        "nested to the cap": (PATH, filled(b'{"prompt": ', b"[")),
        "nested 900 deep, again and again": (PATH, filled(b'{"x": [', b"[" * 900 + b"]" * 900 + b",", b"1]}")),
        "empty lists": (PATH, filled(b'{"prompt": [', b"[],", b"[]]}")),
        "empty messages": (CHAT_PATH, filled(b'{"messages": [', b"{},", b"{}]}")),
        "token ids to the cap": (PATH, filled(b'{"prompt": [', b"1,", b"1]}")),
        "260,000 token ids": (PATH, b'{"prompt": [' + b"1," * 260_000 + b"1]}"),
        "a number": (PATH, filled(b'{"prompt": "x", "seed": ', b"9")),
        "a key": (PATH, filled(b'{"prompt": "x", "', b"k", b'": 1}')),
        "a prompt": (PATH, filled(prompt, b"a", end)),
        "a message": (CHAT_PATH, filled(b'{"messages": [{"role": "user", "content": "', b"a", b'"}]}')),
        "escapes": (PATH, filled(prompt, b"\\u00e9", end)),
        "commas in a text": (PATH, filled(prompt, b",[", end)),
        "bad UTF-8 at the end": (PATH, filled(prompt, b"a", b'\xff"}')),
        "5,000 unknown fields": (PATH, fields.encode()),
        "5,000 tools": (CHAT_PATH, json.dumps({**CHAT, "tools": [TOOL] * 5000}).encode()),
        "100 tools": (CHAT_PATH, json.dumps({**CHAT, "tools": [TOOL] * 100}).encode()),
        "four times the cap": (PATH, prompt + b"a" * (4 * CAP) + end),
    }


def cases() -> dict[str, Callable[[], Iterable[Body]]]:
    repeated = {name: lambda body=body: itertools.repeat(body) for name, body in bodies().items()}
    return {**repeated, "hostile grammars": lambda: map(_asking, hostile_grammars()), "new schemas": new_schemas}


def new_schemas() -> Iterator[Body]:
    return (_asking({"guided_json": record(number)}) for number in itertools.count())


def _asking(parameters: dict[str, Any]) -> Body:
    return PATH, json.dumps({**ASK, **parameters}).encode()


def main() -> None:
    study = Study("hostile_bodies", __doc__, "aiohttp", "msgspec", "tritonclient", "llguidance")
    study.add_argument("--seconds", type=float, default=TURN_S, help="of a turn (default: %(default)g)")
    study.add_argument("--turns", type=int, default=5, help="of each case (default: %(default)s)")
    study.add_argument("--flood", type=int, metavar="N", help="send N grammars instead (default: send bodies)")
    study.add_argument("--only", default="", metavar="TEXT", help="cases whose name has the text")
    options = study.begin()
    port = free_ports(1)
    arguments = ["--openai-port", str(port)]
    with served(WEIGHTS, {}, ports=free_ports(4), arguments=arguments), _streams(port) as streams:
        _gaps(streams, 2.0)  # warm
        if options.flood:
            result = _floods(streams, port, options.flood)
        else:
            made = {name: each for name, each in cases().items() if options.only in name}
            result = {"cap_bytes": CAP, "rows": list(_each_case(streams, port, made, options))}
    show({**row, "range": ""} for row in result["rows"])
    worst = max(row["later"] for row in result["rows"])
    print(f"at most {worst:g} ms later; the goal is {GOAL_MS:g} ms")
    name = "distinct_grammars" if options.flood else ""
    study.save({"goal_ms": GOAL_MS, "worst_ms": worst, **result}, name)


def _each_case(
    streams: list[socket.socket], port: int, made: dict[str, Callable[[], Iterable[Body]]], options: Namespace
) -> Iterator[dict[str, Any]]:
    for name, each in made.items():
        runs = {
            "ordinary": lambda: _beside(streams, port, itertools.repeat(_asking({})), options.seconds),
            "hostile": lambda each=each: _beside(streams, port, each(), options.seconds),
        }
        yield _row(name, in_turns(runs, options.turns, warm_up=0))


Turn = tuple[list[float], Counter[int]]  # gaps in milliseconds; answers by status


def _row(name: str, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Compare the latest tokens, in the median turn: a body that holds up streams does so in each."""
    latest = {kind: [round(max(gaps), 1) for gaps, _ in each] for kind, each in turns.items()}
    median = {kind: statistics.median(each) for kind, each in latest.items()}
    answers = sum((statuses for _, statuses in turns["hostile"]), Counter[int]())
    return {
        "bodies": name,
        "answers": " ".join(f"{count} x {status}" for status, count in sorted(answers.items())),
        **median,
        "later": round(median["hostile"] - median["ordinary"], 1),
        "range": {kind: [min(each), max(each)] for kind, each in latest.items()},
    }


def _beside(streams: list[socket.socket], port: int, each: Iterable[Body], seconds: float) -> Turn:
    with _attack(port, each) as attack:
        gaps = _gaps(streams, seconds)
        attack.send(None)
        return gaps, attack.recv()


def _floods(streams: list[socket.socket], port: int, count: int) -> dict[str, Any]:
    """Send so many grammars, all different, in turns. Compare windows as long as the turns of other cases."""
    numbers = itertools.count()

    def flood(kind: str) -> list[Turn]:
        made = range(PER_TURN[kind])
        each = [_asking({"guided_regex": f"[a-f]{{1,9}}-{next(numbers)}"} if kind == "hostile" else {}) for _ in made]
        with contextlib.ExitStack() as held:
            shares = [each[i::NUM_FLOODING] for i in range(NUM_FLOODING)]
            attacks = [held.enter_context(_attack(port, share, pause_s=0.0)) for share in shares]
            windows = []
            while not all(attack.poll() for attack in attacks):
                windows.append(_gaps(streams, TURN_S))
            answers = sum((attack.recv() for attack in attacks), Counter[int]())
            return [(gaps, Counter[int]()) for gaps in windows[:-1]] + [(windows[-1], answers)]

    runs = {"ordinary": lambda: flood("ordinary"), "hostile": lambda: flood("hostile")}
    before = _memory()
    floods = in_turns(runs, count // PER_TURN["hostile"], warm_up=0)
    turns = {kind: list(itertools.chain.from_iterable(each)) for kind, each in floods.items()}
    return {"rows": [_row("different grammars", turns)], "memory_mb": {"before": before, "after": _memory()}}


def _memory() -> dict[str, float]:
    """Return MB of the engine and of the processes for prompts, and how many these are."""
    below = [(one, " ".join(one.cmdline())) for one in psutil.Process().children(recursive=True)]
    engine, prompts = (
        [one.memory_info().rss / 1e6 for one, command in below if f"tidewheel.{module} " in command]
        for module in ("engine.process", "frontend.prompt_workers")
    )
    return {"engine": round(sum(engine)), "prompts": round(sum(prompts)), "num_prompt_processes": len(prompts)}


# --- streams --------------------------------------------------------------------------------------------------------


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextlib.contextmanager
def _streams(port: int) -> Iterator[list[socket.socket]]:
    while not HTTP.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success:
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
    while time.monotonic() < end:
        ready, _, _ = select.select(streams, [], [], 1.0)
        for stream in ready:
            now, data = time.monotonic(), stream.recv(1 << 16)
            if not data or b'{"error"' in data:
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
def _attack(port: int, each: Iterable[Body], pause_s: float = PAUSE_S) -> Iterator[Connection]:
    """Send the bodies until they end or a message comes; say then how many answers had which status."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_send_all, args=(port, each, pause_s, theirs))
    process.start()
    try:
        yield ours
    finally:
        process.join(10)
        process.kill()


def _send_all(port: int, each: Iterable[Body], pause_s: float, told: Connection) -> None:
    statuses = Counter[int]()
    for path, body in each:
        if told.poll():
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            with contextlib.suppress(OSError):  # refused before its end
                connection.sendall(_request(path, body))
            answer = connection.recv(1 << 16)
            statuses[int(answer.split(b" ", 2)[1]) if answer else 0] += 1
        time.sleep(pause_s)
    told.send(statuses)


if __name__ == "__main__":
    main()
