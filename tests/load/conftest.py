"""The users outside locust: plain objects on plain threads, so that a test can hold a server in the middle."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.triton.grpc_triton import FakeTriton, running
from support.triton.http_triton import FakeHttpTriton

os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"  # before the first import of locust in this process


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with running(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def http_triton() -> Iterator[FakeHttpTriton]:
    with FakeHttpTriton() as fake:
        yield fake


@pytest.fixture
def arguments() -> argparse.Namespace:
    """The defaults of the command line."""
    from locust.argument_parser import LocustArgumentParser

    from tidewheel_client.load.load_options import add_arguments

    parser = LocustArgumentParser()
    add_arguments(parser)
    return parser.parse_args([])


class Fired(list[dict[str, Any]]):
    """What locust was told of, in order."""

    def rows(self) -> list[tuple[str, str, str | None]]:
        return [(event["request_type"], event["name"], event["exception"]) for event in self]


@pytest.fixture
def fired() -> Fired:
    return Fired()


@pytest.fixture
def start(arguments: argparse.Namespace, fired: Fired) -> Iterator[Callable[..., Any]]:
    """Makes a user and starts it: `start(cls, host, grpc_url="…")`."""
    from locust.env import Environment

    users: list[Any] = []

    def make(cls: type[Any], host: str | None = None, **options: object) -> Any:
        environment = Environment(parsed_options=argparse.Namespace(**{**vars(arguments), **options}))
        environment.events.request.add_listener(lambda **event: fired.append(event))
        user = cls(environment)
        user.host = host
        users.append(user)
        user.on_start()
        return user

    yield make
    for user in users:
        user.on_stop()
