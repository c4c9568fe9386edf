"""One peer engine behind a pipe, run as a file: `PYTHON worker.py KIND OPTIONS_JSON`.

In:  `{"id": 1, "input_ids": […], "max_tokens": 16}` a line.
Out: `{"ready": true, "versions": {…}, "streams": true}` once, then after each step a list of `[id, new tokens, is
it done]`; `{"error": "…"}` before a failure ends it.

This file imports only the standard library and the peer's module, so it runs in any environment that has both.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO

Event = tuple[int, int, bool]  # request, new tokens, done


class Peer(Protocol):
    """Greedy decoding to the given length, ignoring end of sequence."""

    versions: dict[str, str]
    streams: bool  # tokens come as they are made

    def add(self, request_id: int, input_ids: list[int], max_tokens: int) -> None: ...

    def step(self) -> list[Event]:
        """Return new events, after a short wait if need be."""


PEERS = {
    "transformers": "transformers_batch",
    "vllm": "vllm_engine",
    "openvino": "openvino_pipeline",
    "llm": "tidewheel_llm",
}


def main() -> NoReturn:
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    # Libraries print to standard output, so the pipe moves.
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        sys.path.insert(0, str(Path(__file__).parent))
        peer: Peer = import_module(PEERS[kind]).make(options)
        output.write(json.dumps({"ready": True, "versions": peer.versions, "streams": peer.streams}) + "\n")
        _serve(peer, output)
    except Exception as error:
        output.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        traceback.print_exc()
    os._exit(1)


def _serve(peer: Peer, output: TextIO) -> NoReturn:
    inbox: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()
    running = 0
    while True:
        item = _next(inbox) if running else inbox.get()
        while item is not None:
            peer.add(item["id"], item["input_ids"], item["max_tokens"])
            running += 1
            item = _next(inbox)
        events = peer.step()
        running -= sum(done for _, _, done in events)
        if events:
            output.write(json.dumps(events) + "\n")


def _next(inbox: queue.Queue[dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return inbox.get_nowait()
    except queue.Empty:
        return None


def _read(inbox: queue.Queue[dict[str, Any]]) -> None:
    """Exit when the pipe closes, whatever threads the peer has."""
    for line in sys.stdin:
        inbox.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
