"""The gateway in a thread of this process, in front of Tritons without models."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from support.triton.grpc_triton import Answer, Asked, response
from support.triton.serving import wait_for
from tidewheel.gateway.api_keys import ApiKeys
from tidewheel.gateway.application import Gateway
from tidewheel.gateway.client_connections import HttpListener
from tidewheel.gateway.gateway_options import Address, GatewayOptions
from tidewheel.gateway.upstreams import Upstreams


@dataclass
class RunningGateway:
    url: str
    upstreams: Upstreams
    session: requests.Session = field(default_factory=requests.Session)

    def get(self, path: str, **options: Any) -> requests.Response:
        return self.session.get(f"{self.url}{path}", timeout=30, **options)

    def post(self, path: str, body: Any, **options: Any) -> requests.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        return self.session.post(f"{self.url}/v1/{path}", data=data, headers=headers, timeout=30, **options)

    def complete(self, prompt: Any = "one two", *, headers: Any = None, **fields: Any) -> requests.Response:
        return self.post("completions", {"model": "demo", "prompt": prompt, **fields}, headers=headers or {})

    def chat(self, content: str = "one two", *, headers: Any = None, **fields: Any) -> requests.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": "demo", "messages": messages, **fields}
        return self.post("chat/completions", body, headers=headers or {})


class _Options(GatewayOptions, frozen=True, kw_only=True):
    max_bytes: int

    @property
    def max_body_bytes(self) -> int:
        return self.max_bytes


@contextmanager
def gateway_to(
    *ports: int,
    keys: Path | None = None,
    max_body_bytes: int = 1 << 20,
    addresses: Sequence[Address] = (),
    playground: bool = False,
    open_metrics: bool = False,
    cors_origin: tuple[str, ...] = (),
    upstreams: Upstreams | None = None,
) -> Iterator[RunningGateway]:
    """Run it until the block ends. It has looked at every server once; `upstreams` take the place of addresses."""
    if upstreams is None:
        upstreams = Upstreams([*(Address(f"127.0.0.1:{port}") for port in ports), *addresses])
    pages = {"playground": playground, "open_metrics": open_metrics, "cors_origin": cors_origin}
    options = _Options(port=0, drain_s=0, max_bytes=max_body_bytes, **pages)
    gateway = Gateway(upstreams, ApiKeys(keys), options)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    listener = run(HttpListener.open(gateway.application(), options))
    try:
        running = RunningGateway(f"http://127.0.0.1:{listener.addresses[0][1]}", upstreams)
        wait_for(lambda: all("not asked" not in one.not_ready for one in upstreams.each), 60, "looks")
        yield running
        running.session.close()
    finally:
        run(listener.cleanup())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def events(answer: requests.Response) -> list[Any]:
    """Return the JSON of every event; the last one must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def entry(secret: str, **limits: object) -> str:
    """Return a key's entry in the file of keys."""
    lines = {"name": secret, "sha256": hashlib.sha256(secret.encode()).hexdigest(), **limits}
    return "\n".join(["[[keys]]", *(f"{key} = {value!r}" for key, value in lines.items()), ""])


def say(asked: Asked, **outputs: Any) -> Answer:
    """Yield one last response of one sequence, with two tokens."""
    yield response(
        asked.message,
        **{
            "text_output": "ab",
            "finish_reason": "stop",
            "num_input_tokens": ("UINT32", "I", [7]),
            "num_output_tokens": ("UINT32", "I", [2]),
            **outputs,
        },
    )


def uints(*values: int) -> tuple[str, str, tuple[int, ...]]:
    return ("UINT32", "I", values)


def perf(*cached: int) -> dict[str, Any]:
    """Return outputs of `return_perf_metrics`."""
    names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    blocks = ("kv_cache_reused_blocks", "kv_cache_alloc_new_blocks", "priority")
    ones = [1] * len(cached)
    return {
        **dict.fromkeys(names, ("INT64", "q", ones)),
        **dict.fromkeys(blocks, ("INT32", "i", ones)),
        "num_cached_tokens": ("INT32", "i", cached),
    }
