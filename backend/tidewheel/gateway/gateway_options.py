import sys
from typing import NamedTuple

import msgspec

from tidewheel.gateway import ADDRESS_FORM, MAX_BODY_MB
from tidewheel.gateway.output_parser import Reasoning

_DNS = "dns:"
_PORTS = ("metrics", "health", "http")


class Address(NamedTuple):
    """`HOST:PORT` of each endpoint of a server; empty if unknown."""

    grpc: str
    metrics: str = ""
    health: str = ""  # of `tidewheel serve`
    http: str = ""  # of Triton, for proxied requests
    is_name_of_many: bool = False  # each address of the host is a server
    cost: int = 0  # servers of the least are preferred

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Return the address of a text in `ADDRESS_FORM`. Raise ValueError."""
        authority, *others = text.removeprefix(_DNS).split(",")
        host, _, port = authority.rpartition(":")
        pairs = (other.partition("=") for other in others)
        numbers = {name: number for name, _, number in pairs}
        are_numbers = all(number.isdecimal() for number in (port, *numbers.values()))
        if host and are_numbers and len(numbers) == len(others) and numbers.keys() <= {*_PORTS, "cost"}:
            cost = int(numbers.pop("cost", 0))
            if all(0 < int(one) < 65536 for one in (port, *numbers.values())):
                authorities = {name: f"{host}:{one}" for name, one in numbers.items()}
                return cls(authority, **authorities, is_name_of_many=text.startswith(_DNS), cost=cost)
        raise ValueError(f"{text!r} is no address: write {ADDRESS_FORM}")

    def at(self, host: str) -> "Address":
        host = f"[{host}]" if ":" in host else host
        grpc, metrics, health, http = (one and f"{host}:{one.rpartition(':')[2]}" for one in self[:4])
        return Address(grpc, metrics, health, http, cost=self.cost)


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8080  # 0: a free one
    api_keys: str = ""  # TOML file; empty: no key is needed
    max_body_mb: int = MAX_BODY_MB
    reasoning: Reasoning = "tagged"
    open_metrics: bool = False  # /metrics needs no key
    playground: bool = False
    cors_origin: tuple[str, ...] = ()  # origins whose web pages may ask; `*`: all
    drain_s: float = 30.0

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mb << 20


class StandaloneOptions(GatewayOptions, frozen=True, kw_only=True):
    upstreams: tuple[Address, ...] = ()
    workers: int = 1

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "tidewheel.gateway.run_gateway", msgspec.json.encode(self).decode()]


def announce(host: str, port: int) -> None:
    print(f"OpenAI API at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)  # noqa: T201
