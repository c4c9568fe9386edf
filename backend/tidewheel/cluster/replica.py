import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import aiohttp
import psutil

from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_settings import ClusterSettings
from tidewheel.cluster.ray_scaling import figures_of
from tidewheel.engine.connection import drain_all
from tidewheel.health_endpoint import Readiness
from tidewheel.private_dir import read_value, run_dir
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.workdir import current_engines_of
from tidewheel_process import process_tree
from tidewheel_process.child import Child, wait_until
from tidewheel_process.locked_folder import new_folder, remove_left_over

START_LIMIT_S = 1800.0  # until a replica without a ready server is replaced
_LOOK_S = 0.1
_ASK_S = 2.0
_DRAIN_LOOK_S = 0.5
_END_S = 15.0
_PREFIX = "replica-"
_FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0")


class Replica:
    async def __init__(self, settings: ClusterSettings) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Start the server, or raise `ClusterError`."""
        self._born = self._ready_at = time.monotonic()
        self._stream_limit_s = settings.stream_limit_s
        host = "127.0.0.1"
        if settings.replica_host == "node":
            import ray.util

            host = str(ray.util.get_node_ip_address())
        self._server = ServerChild(settings.serve_options, host)
        self._figures: dict[str, float] = {}
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S))
        try:
            while not (await self._readiness()).is_ready:
                self._check_patience()
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            await self._http.close()
            await asyncio.to_thread(self._server.stop)
            raise
        self._ready_at = time.monotonic()

    async def check_health(self) -> None:
        """Raise `ClusterError` if Ray must replace this replica; a restarting server is healthy."""
        readiness = await self._readiness()
        if not readiness.is_live:
            raise ClusterError(f"{readiness.state}: {readiness.reason}")
        if readiness.is_ready:
            self._ready_at = time.monotonic()
        self._check_patience()

    async def wait_for_start(self) -> None:
        """Return at once. Ray queues the call until a replica exists."""

    def record_replica_metadata(self) -> dict[str, str]:
        """Return the server's addresses: the fields of `Address`."""
        assert self._server.endpoints is not None
        return self._server.endpoints.authorities

    async def record_routing_stats(self) -> dict[str, float]:
        """Return the server's metrics for gateway and status; without an answer, the previous ones."""
        endpoints = self._server.endpoints
        assert endpoints is not None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self._http.get(endpoints.metrics_url) as answer:
                self._figures = figures_of(await answer.text())
        await asyncio.to_thread(self._server.count_restarts)
        if not self._figures:
            return {}
        is_ready = False
        with contextlib.suppress(ClusterError):
            is_ready = (await self._readiness()).is_ready
        restarts = self._server.num_restarts + self._figures.get("engine_restarts", 0.0)
        age_s = time.monotonic() - self._born
        return {**self._figures, "is_ready": float(is_ready), "age_s": age_s, "restarts": restarts}

    record_autoscaling_stats = record_routing_stats

    async def __del__(self) -> None:
        if hasattr(self, "_http"):
            await asyncio.to_thread(self._server.drain, self._stream_limit_s)
            await asyncio.to_thread(self._server.stop)
            await self._http.close()

    async def _readiness(self) -> Readiness:
        self._server.check_alive()
        if (endpoints := self._server.endpoints) is None:
            return Readiness("starting", "it chooses its ports")
        try:
            async with self._http.get(endpoints.ready_url) as answer:
                reply = await answer.json()
                return Readiness(reply["state"], reply["reason"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            return Readiness("starting", f"its health endpoint does not answer: {error}")

    def _check_patience(self) -> None:
        if time.monotonic() - self._ready_at > START_LIMIT_S:
            raise ClusterError(f"the server is not ready for {START_LIMIT_S:g} s: {self._server.log}")


class ServerChild:
    """Child process `tidewheel serve`. It ends when its standard input closes, also when this process dies."""

    def __init__(self, options: Sequence[str], host: str) -> None:
        remove_left_over(base := run_dir(), _PREFIX)
        self._made = contextlib.ExitStack()
        folder = self._made.enter_context(new_folder(base, _PREFIX))
        self._ports = folder / "ports.json"
        self.log = folder / "log"
        self.num_restarts = 0
        self._endpoints: Endpoints | None = None
        self._tritonserver: psutil.Process | None = None
        # `drain` comes before, and a killed replica's requests shall fail at once.
        manner = (f"--ports-file={self._ports}", "--end-with-stdin", "--drain-s=0")
        command = [sys.executable, "-P", "-m", "tidewheel.cli.main", "serve", *options, f"--host={host}"]
        with self.log.open("wb") as output:
            self._child = Child(
                [*command, *_FREE_PORTS, *manner],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                # Ray's token is not for servers.
                env={key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SERVE_"))},
            )

    @property
    def endpoints(self) -> Endpoints | None:
        """Ports of the server; None until it has chosen them."""
        if self._endpoints is None:
            self._endpoints = read_value(self._ports, Endpoints)
        return self._endpoints

    def check_alive(self) -> None:
        """Raise `ClusterError` if the server's process has ended."""
        if not self._child.has_ended:
            return
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("tidewheel: error: ")] or lines or ["it printed nothing"]
        reason = errors[-1].removeprefix("tidewheel: error: ")
        raise ClusterError(f"tidewheel serve ended with {self._child.exit}: {reason}")

    def count_restarts(self) -> None:
        for process in process_tree.children(self._child.pid):
            if process_tree.name(process) == "tritonserver" and process != self._tritonserver:
                self.num_restarts += self._tritonserver is not None
                self._tritonserver = process

    def drain(self, limit_s: float) -> None:
        """Refuse new requests, which the gateway sends elsewhere, and wait for running ones."""
        engines = [] if self.endpoints is None else current_engines_of(self.endpoints.metrics)
        wait_until(lambda: not drain_all(engines, _ASK_S), limit_s, _DRAIN_LOOK_S)

    def stop(self) -> None:
        self._child.stdin.close()
        if not self._child.ends_within(_END_S):
            self._child.kill()  # its guard ends the rest
        self._made.close()
