import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Literal, get_args

import aiohttp
import msgspec
from tritonclient.grpc import service_pb2 as pb

from tidewheel.fleet.routers import ReplicaTerms
from tidewheel.gateway.gateway_options import Address
from tidewheel_client import AsyncClient, Health
from tidewheel_client.errors import RequestError, RequestTimeout
from tidewheel_client.grpc_transport import AsyncGrpcTransport

Task = Literal["generate", "draw", "embed", "rerank"]
TASKS: tuple[Task, ...] = get_args(Task)
_TENSORS: Mapping[Task, set[str]] = {
    "generate": {"messages", "sampling_parameters"},
    "draw": {"image", "png", "step"},
    "embed": {"text", "embedding", "num_input_tokens"},
    "rerank": {"query", "text", "score", "num_input_tokens"},
}
_STREAMED = ("generate", "draw")  # by decoupled models
LOOK_S = 0.5
FRESH_S = 0.1  # age of a fresh look, and the wait for another
PROBE_S = 3.0
SILENCE_S = 1.5  # of a server, after `PROBE_S`
LATE_S = 0.2  # that this process may be late itself, else the silence proves nothing
NUM_ROUND_TRIPS = 20  # whose least counts: others waited for a processor

logger = logging.getLogger(__name__)


class Upstream:
    def __init__(self, address: Address, name: str = "") -> None:
        """Begin to poll the server. `name`: the name that resolved to its address, if any."""
        self.address = address
        self.name = name
        self.num_open = 0  # requests
        self.num_sent = 0
        self.num_responses = 0  # also parts of one
        self.not_ready = "it was not asked yet"  # reason; empty: ready
        self.models: Mapping[str, Task] = {}  # what each does
        self.loras: dict[str, Mapping[str, str]] = {}  # folder of each adapter, by the models that were asked
        self._round_trips = deque[float](maxlen=NUM_ROUND_TRIPS)
        self._tasks: dict[str, Task | None] = {}  # None: a model that the gateway does not serve
        self._connect()
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = -FRESH_S
        self._watching = asyncio.create_task(self._watch())

    def _connect(self) -> None:
        self.triton = AsyncGrpcTransport(self.address.grpc)
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_S))

    @property
    def terms(self) -> ReplicaTerms:
        return ReplicaTerms(self.address.cost, min(self._round_trips, default=0.0))

    async def close(self) -> None:
        self._watching.cancel()
        if self._looking is not None:
            self._looking.cancel()
        await self.triton.close()
        await self.http.close()

    async def close_when_idle(self) -> None:
        try:
            while self.num_open:
                await asyncio.sleep(LOOK_S)
        finally:
            await self.close()

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Poll readiness and models; concurrent calls share one poll."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    async def look_again(self) -> None:
        """Poll unless the last poll is fresh; wait for at most `FRESH_S`."""
        if time.monotonic() - self._looked_at >= FRESH_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FRESH_S):
                    await self.look()

    async def _look(self) -> None:
        began, num_responses = time.monotonic(), self.num_responses
        try:
            reason = await self._find_reason()
            if not reason:
                self.models = await self._list_models()
            self.not_ready = reason
        except RequestError as error:
            self.not_ready = str(error)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
            self.not_ready = f"its readiness cannot be asked at {self.address.health}: {error}"
        self._looked_at = time.monotonic()
        # Not at every failure: calls to a server that starts delay its connection.
        may_be_silent = self.num_open > 0 or self._looked_at - began > SILENCE_S
        if self.not_ready and may_be_silent and await self._is_silent(began) and self.num_responses == num_responses:
            await self._reconnect()

    async def _is_silent(self, since: float) -> bool:
        """Return whether another call has no answer either, which Triton gives in any state."""
        began = time.monotonic()
        limit_s = max(since + PROBE_S - began, 0.0) + SILENCE_S
        try:
            await self.triton.call("ServerLive", pb.ServerLiveRequest(), limit_s)
        except RequestError as error:  # others are an answer, or a lost connection, which ends its requests
            return isinstance(error, RequestTimeout) and time.monotonic() - began < limit_s + LATE_S
        return False

    async def _reconnect(self) -> None:
        """Close the connections. Their requests end as with a lost server, and later answers to them are dropped."""
        self.not_ready = f"{self.address.grpc} does not answer"
        if self.num_open:
            logger.warning("%s: its %d requests end", self.not_ready, self.num_open)
        old = self.triton, self.http
        self._connect()
        for connection in old:
            await connection.close()

    async def _find_reason(self) -> str:
        """Return why the server is not ready; empty if ready. Triton's own readiness misses dead and hung engines."""
        if self.address.health:
            async with self.http.get(f"http://{self.address.health}/ready") as answer:
                health = msgspec.json.decode(await answer.read(), type=Health)
                return "" if health.is_ready else f"{health.state}: {health.reason}"
        reply = await self.triton.call("ServerReady", pb.ServerReadyRequest(), PROBE_S)
        return "" if reply.ready else "Triton is not ready"

    async def _list_models(self) -> Mapping[str, Task]:
        sent = time.monotonic()
        index = await self.triton.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True), PROBE_S)
        self._round_trips.append(time.monotonic() - sent)
        known, names = self._tasks, {model.name for model in index.models}
        self._tasks = {name: known[name] if name in known else await self._find_task(name) for name in names}
        return {name: task for name, task in self._tasks.items() if task}

    async def _find_task(self, model: str) -> Task | None:
        config = (await self.triton.call("ModelConfig", pb.ModelConfigRequest(name=model), PROBE_S)).config
        names = {tensor.name for tensor in (*config.input, *config.output)}
        is_stream = config.model_transaction_policy.decoupled
        tasks = (task for task in TASKS if is_stream == (task in _STREAMED) and _TENSORS[task] <= names)
        return next(tasks, None) if config.max_batch_size == 0 else None

    def client(self, model: str) -> AsyncClient:
        return AsyncClient(self.address.grpc, model, transport=self.triton)

    async def list_loras(self) -> None:
        """List each model's adapters; a model that does not answer keeps its last list."""
        self.loras = {model: loras for model, loras in self.loras.items() if model in self.models}
        for model, task in self.models.items():
            if task == "generate" and not self.not_ready:
                with contextlib.suppress(RequestError):  # perhaps of an older server
                    loras = await self.client(model).list_loras(timeout_s=PROBE_S)
                    self.loras[model] = {one.name: one.path for one in loras}

    async def metrics(self) -> str:
        """Return the text of `/metrics`, empty without an answer."""
        if not self.address.metrics:
            return ""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with self.http.get(f"http://{self.address.metrics}/metrics") as answer:
                return await answer.text() if answer.ok else ""
        return ""
