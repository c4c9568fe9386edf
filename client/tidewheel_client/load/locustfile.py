"""Locust file for a Tidewheel server (docs/clients.md); `load_options.py` explains the statistics."""

import logging
import socket
from typing import Any
from urllib.parse import urlsplit

import gevent
from grpc.experimental import gevent as grpc_gevent
from locust import events

from tidewheel_client.load.load_options import OptionError, Work, add_arguments
from tidewheel_client.load.users import GrpcStreamUser, HttpInferUser, HttpStreamUser

__all__ = ["GrpcStreamUser", "HttpInferUser", "HttpStreamUser"]

CONNECT_TIMEOUT_S = 5.0
logger = logging.getLogger("tidewheel_client.load")
events.init_command_line_parser.add_listener(add_arguments)  # type: ignore[no-untyped-call]


@events.init.add_listener  # type: ignore[untyped-decorator]
def _let_grpc_yield(**_: Any) -> None:
    """Let waiting gRPC calls yield, after worker processes have forked."""
    grpc_gevent.init_gevent()


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _check_test(environment: Any, **_: Any) -> None:
    try:
        Work(environment.parsed_options, "")
    except OptionError as error:
        logger.error("%s", error)
        gevent.spawn(environment.runner.stop)
        return
    addresses = {user.address(environment.parsed_options, environment.host) for user in environment.user_classes}
    silent = [address for address in sorted(addresses) if not _answers(address)]
    if silent:
        text = "no server answers at %s: start one with 'tidewheel serve', or name its address"
        logger.error(text, ", ".join(silent))
        environment.process_exit_code = 1
        gevent.spawn(environment.runner.stop if environment.web_ui else environment.runner.quit)


def _answers(address: str) -> bool:
    place = urlsplit(address if "//" in address else f"//{address}")
    try:
        port = place.port or {"https": 443}.get(place.scheme, 80)
        socket.create_connection((place.hostname or "", port), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True
