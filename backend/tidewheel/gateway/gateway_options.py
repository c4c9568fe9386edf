from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidewheel.gateway.spoken import Reasoning
from tidewheel.gateway.upstream import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    upstreams: Sequence[Address]
    max_body_mb: int
    host: str = "127.0.0.1"
    port: int = 0
    api_keys: Path | None = None
    drain_s: float = 30.0
    reasoning: Reasoning = "tagged"
    workers: int = 1
    open_metrics: bool = False  # /metrics needs no key, for scrapers that cannot send one
    continue_greedy: bool = False  # streams whose server is lost go on at another one, where that is possible
    playground: bool = False  # a page for people, which an API for programs does not need


def announce(host: str, port: int) -> None:
    print(f"OpenAI API at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)  # noqa: T201
