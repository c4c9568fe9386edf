"""Load on a Tidewheel server, for locust:

    locust -f client/tidewheel_client/load/locustfile.py --headless -u 200 -r 50 -t 2m GrpcStreamUser

Users are GrpcStreamUser, HttpStreamUser and HttpInferUser (none named: all three); without --headless there is a
web page. `tidewheel_client/load/locust_rows.py` explains the rows of the statistics.
"""

from __future__ import annotations

import logging
from typing import Any

import gevent
from grpc.experimental import gevent as grpc_gevent
from locust import events

from tidewheel_client.load.load_options import LoadOptions, OptionError, add_arguments
from tidewheel_client.load.users import GrpcStreamUser, HttpInferUser, HttpStreamUser

__all__ = ["GrpcStreamUser", "HttpInferUser", "HttpStreamUser"]


logger = logging.getLogger("tidewheel_client.load")


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: Any) -> None:
    add_arguments(parser)


@events.init.add_listener  # type: ignore[untyped-decorator]
def _let_grpc_yield(environment: Any, **kwargs: Any) -> None:
    """Let waiting calls yield to other users. Worker processes have forked by now."""
    del environment, kwargs
    grpc_gevent.init_gevent()


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _check_options(environment: Any, **kwargs: Any) -> None:
    """End a test with bad options from the web page."""
    del kwargs
    try:
        LoadOptions.from_arguments(environment.parsed_options)
    except OptionError as error:
        logger.error("%s", error)
        gevent.spawn(environment.runner.stop)
