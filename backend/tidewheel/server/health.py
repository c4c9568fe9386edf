from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tidewheel.engine.folder import current_engines, devices_of_ranks, label_of
from tidewheel.engine.heartbeat import EngineWatch
from tidewheel.health_endpoint import READY, HealthEndpoint, Readiness
from tidewheel.server import ServeError
from tidewheel.server.endpoints import Endpoints
from tidewheel_process.restarts import CrashLoop

LOOK_S = 0.2
ASK_S = 1.0  # between two requests to tritonserver
STARTING = Readiness("starting", "the server loads its models")


class HealthMonitor:
    """Health endpoint of `tidewheel serve`, with threads that watch engines and tritonserver."""

    def __init__(self, endpoints: Endpoints, is_live: Callable[[], bool]) -> None:
        """Raise `ServeError` if the port is taken."""
        self.server: Callable[[], Readiness] = lambda: STARTING  # engines count when it is READY
        self._is_live = is_live
        self._watches: dict[Path, EngineWatch] = {}
        self._seen = {"engines": READY, "tritonserver": READY}
        self._stopped = threading.Event()
        try:
            self._endpoint = HealthEndpoint(endpoints.host, endpoints.health, self.report, devices_of_ranks)
        except OSError as error:
            raise ServeError(f"cannot listen on port {endpoints.health} (--health-port): {error.strerror}") from None
        self._threads = [
            threading.Thread(target=self._repeat, args=arguments, daemon=True)
            for arguments in (("engines", self.look, LOOK_S), ("tritonserver", self.ask, ASK_S))
        ]

    def report(self) -> Readiness:
        return next((one for one in (self.server(), *self._seen.values()) if not one.is_ready), READY)

    def raise_if_given_up(self) -> None:
        engines = self._seen["engines"]
        if not engines.is_live:
            raise CrashLoop(f"an engine is given up: {engines.reason}")

    def look(self) -> Readiness:
        """Return the worst readiness of all engines."""
        self._watches = {link: self._watches.get(link) or EngineWatch(link) for link in current_engines()}
        seen = [(label_of(link), watch.look()) for link, watch in self._watches.items()]
        bad = [Readiness(one.state, f"{label}: {one.reason}") for label, one in seen if one and not one.is_ready]
        return min(bad, key=lambda one: one.is_live, default=READY)

    def ask(self) -> Readiness:
        is_silent = self.server().is_ready and not self._is_live()
        return Readiness("stopped", "tritonserver does not answer") if is_silent else READY

    def _repeat(self, name: str, judge: Callable[[], Readiness], interval_s: float) -> None:
        while not self._stopped.wait(interval_s):
            try:
                self._seen[name] = judge()
            except Exception as error:  # unknown is not ready
                self._seen[name] = Readiness("stopped", f"{name} cannot be examined: {error}")

    def __enter__(self) -> HealthMonitor:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._threads[0].join()  # it must not outlive the run folder
        self._endpoint.close()
