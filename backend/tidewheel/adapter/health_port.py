from __future__ import annotations

import logging
from collections.abc import Callable

from tidewheel.health_endpoint import HealthEndpoint, Readiness

log = logging.getLogger(__name__)


class HealthPort:
    """Endpoint of a model. Of its front ends one has the port; if it ends, the next to `try_open` takes it."""

    def __init__(self, host: str, port: int | None, report: Callable[[], Readiness]) -> None:
        self._host = host
        self._port = port
        self._report = report
        self._endpoint: HealthEndpoint | None = None
        self._problem = ""

    def try_open(self) -> None:
        if self._port is None or self._endpoint is not None:
            return
        try:
            self._endpoint = HealthEndpoint(self._host, self._port, self._report)
        except OSError as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.info("health_port %d is not opened here: %s", self._port, error.strerror)
        else:
            log.info("readiness: http://%s:%d/ready", self._host, self._endpoint.port)

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
