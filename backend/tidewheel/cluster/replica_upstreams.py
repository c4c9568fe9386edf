import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tidewheel.cluster.cluster_settings import ClusterSettings
from tidewheel.fleet.routers import ROUTERS
from tidewheel.gateway.gateway_options import Address
from tidewheel.gateway.upstream import TASKS, Task
from tidewheel.gateway.upstreams import Attempt, Upstreams
from tidewheel_client.errors import Busy, RequestError

MAX_HELD = 1024  # waiting for a replica
_LOOK_S = 0.1


class KnownReplica(NamedTuple):
    address: Address
    figures: Mapping[str, float]  # last report; empty before the first


class ReplicaFeed:
    """Current replicas, published by Ray's router from its own thread."""

    def __init__(self) -> None:
        self.replicas: Sequence[KnownReplica] = ()  # replaced as a whole
        self.on_change: Callable[[], object] = lambda: None

    def publish(self, replicas: Sequence[KnownReplica]) -> None:
        self.replicas = replicas
        self.on_change()


FEED = ReplicaFeed()  # of this process, shared with the router that Ray makes


class ReplicaUpstreams(Upstreams):
    """Gateway upstreams from Ray's replicas. A removed replica drains and refuses late requests."""

    def __init__(self, handle: Any, feed: ReplicaFeed, settings: ClusterSettings) -> None:
        super().__init__(())
        self._router = ROUTERS[settings.router]()
        self._may_be_empty = settings.replicas == 0  # then waiting requests start a replica
        self._patience_s = settings.patience_s
        self._handle = handle
        self._feed = feed
        self._known_models: Mapping[str, Task] = {}
        self._num_held = 0

    async def __aenter__(self) -> "ReplicaUpstreams":
        loop = asyncio.get_running_loop()
        self._feed.on_change = lambda: loop.call_soon_threadsafe(self._read_feed)
        self._read_feed()
        return self

    @property
    def models(self) -> Mapping[str, Task]:
        """Models of all replicas; without replicas, the last known ones."""
        return super().models or self._known_models

    @property
    def not_ready(self) -> str:
        if self._members:
            return super().not_ready
        return "" if self._may_be_empty else "no replica has started"

    def model(self, name: str, tasks: Sequence[Task] = TASKS) -> tuple[str, Task]:
        """Accept any model name until a replica has listed its models."""
        return (name, tasks[0]) if name and not self.models else super().model(name, tasks)

    def _read_feed(self) -> None:
        self._known_models = self.models
        self._set_members("replica", (one.address for one in self._feed.replicas))

    async def _wait(self, attempt: Attempt) -> None:
        """Wait for a replica. If none exists, a call waits in Ray's queue, where the scaling policy sees it."""
        if self._num_held >= MAX_HELD:
            raise Busy(f"no replica is ready, and {MAX_HELD} requests wait for one already")
        call: Any = None
        patience_s = min(self._patience_s, max(attempt.request.due() - time.monotonic(), 0.0))
        self._num_held += 1
        try:
            async with asyncio.timeout(patience_s):
                while not self._has_fit(attempt):
                    if call is None and not self._members:
                        call = self._handle.wait_for_start.remote()
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            await super()._wait(attempt)
        finally:
            self._num_held -= 1
            if call is not None:
                call.cancel()

    async def _may_retry(self, attempt: Attempt, error: RequestError) -> bool:
        """Allow a retry after a lost or restarting replica, not after `Busy`."""
        if await super()._may_retry(attempt, error):
            return True
        if isinstance(error, Busy):
            return False
        attempt.refused.clear()  # a restarted server may take it
        return True
