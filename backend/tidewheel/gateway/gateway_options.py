from __future__ import annotations

from pathlib import Path

import msgspec

from tidewheel.gateway import MAX_BODY_MB
from tidewheel.gateway.output_parser import Reasoning
from tidewheel.gateway.upstream import Address


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8080  # 0: a free one
    api_keys: str = ""  # TOML file; empty: no key is needed
    max_body_mb: int = MAX_BODY_MB
    reasoning: Reasoning = "tagged"
    open_metrics: bool = False  # /metrics needs no key
    playground: bool = False
    drain_s: float = 30.0  # for open requests

    @property
    def key_file(self) -> Path | None:
        return Path(self.api_keys) if self.api_keys else None

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mb << 20


class StandaloneOptions(GatewayOptions, frozen=True, kw_only=True):
    upstreams: tuple[Address, ...]
    workers: int = 1


def announce(host: str, port: int) -> None:
    print(f"OpenAI API at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)  # noqa: T201
