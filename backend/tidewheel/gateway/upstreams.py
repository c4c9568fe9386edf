"""Servers behind the gateway: which are ready, which models they have, and which one gets a request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import aiohttp
from tritonclient.grpc import service_pb2 as pb

from tidewheel.fleet.router import HashRing
from tidewheel_client import Chunk
from tidewheel_client.grpc_transport import AsyncGrpcTransport
from tidewheel_client.request_errors import NotFound, RequestError, ServerUnavailable
from tidewheel_client.stream import Arrivals

LOOK_S = 0.5  # between two looks at a server
FRESH_S = 0.1  # age of a look that `/health` may tell, and time that it waits for another
PROBE_S = 3.0


class Address(NamedTuple):
    """Authorities (host:port) of a server; empty: unknown."""

    grpc: str
    metrics: str = ""
    health: str = ""  # of `tidewheel serve`, or of an entry's `health_port`

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `HOST:PORT[,metrics=PORT][,health=PORT]`. Raise ValueError."""
        authority, *others = text.split(",")
        host, _, port = authority.rpartition(":")
        pairs = (other.partition("=") for other in others)
        ports = {name: number for name, _, number in pairs}
        is_number = all(one.isdecimal() and 0 < int(one) < 65536 for one in (port, *ports.values()))
        if not host or not is_number or len(ports) < len(others) or ports.keys() - {"metrics", "health"}:
            raise ValueError(f"{text!r} is no address: write HOST:PORT[,metrics=PORT][,health=PORT]")
        return cls(authority, **{name: f"{host}:{port}" for name, port in ports.items()})


class Upstream:
    """One server."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.num_open = 0  # requests
        self.not_ready = "it was not asked yet"  # why; empty: it is ready
        self.models: frozenset[str] = frozenset()  # as seen last
        self._foreign: set[str] = set()  # models that are not ours
        self._http: aiohttp.ClientSession | None = None
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = -FRESH_S

    async def open(self) -> None:
        self._triton = AsyncGrpcTransport(self.address.grpc)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_S))

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self._triton.close()
        if self._http is not None:
            await self._http.close()

    async def look(self) -> None:
        """Note whether it is ready, and its models. Looks at one time are one."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    async def look_again(self) -> None:
        """Look unless it was just done. Do not wait long for a server that hangs: the look goes on."""
        if time.monotonic() - self._looked_at >= FRESH_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FRESH_S):
                    await self.look()

    async def _look(self) -> None:
        try:
            reason = await self._reason()
            if not reason:
                self.models = await self._list_models()
            self.not_ready = reason
        except RequestError as error:
            self.not_ready = str(error)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self.not_ready = f"its readiness cannot be asked at {self.address.health}: {error}"
        self._looked_at = time.monotonic()

    async def stream(self, request: pb.ModelInferRequest) -> AsyncGenerator[list[Chunk]]:
        """Yield the news of each response. Raise `RequestError`. Leaving it early cancels the request."""
        arrivals = Arrivals()
        responses = self._triton.send(request)
        self.num_open += 1
        try:
            while (response := await responses.receive()) is not None:
                if chunks := arrivals.take(response):
                    yield chunks
            if not arrivals.is_over:
                raise ServerUnavailable("the stream ended before its last response")
        finally:
            self.num_open -= 1
            responses.cancel()

    async def metrics(self) -> str:
        """Return the text of its `/metrics`, empty if it cannot be had."""
        if not self.address.metrics or self._http is None:
            return ""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with self._http.get(f"http://{self.address.metrics}/metrics") as answer:
                return await answer.text() if answer.ok else ""
        return ""

    async def _reason(self) -> str:
        """Return why it is not ready. Triton knows nothing of an engine that is dead or hangs."""
        if self.address.health:
            assert self._http is not None
            async with self._http.get(f"http://{self.address.health}/ready") as answer:
                said = await answer.json()
                return "" if said["ready"] is True else f"{said['state']}: {said['reason']}"
        answer = await self._ask("ServerReady", pb.ServerReadyRequest())
        return "" if answer.ready else "Triton is not ready"

    async def _list_models(self) -> frozenset[str]:
        index = await self._ask("RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
        names = {model.name for model in index.models}
        self._foreign &= names
        for name in names - self.models - self._foreign:
            if not await self._is_ours(name):
                self._foreign.add(name)
        return frozenset(names - self._foreign)

    async def _is_ours(self, model: str) -> bool:
        """Return whether it streams, and has the inputs that the gateway sends."""
        config = (await self._ask("ModelConfig", pb.ModelConfigRequest(name=model))).config
        inputs = {tensor.name for tensor in config.input}
        is_plain = config.model_transaction_policy.decoupled and config.max_batch_size == 0
        return is_plain and {"messages", "sampling_parameters"} <= inputs

    async def _ask(self, method: str, request: Any) -> Any:
        return await self._triton.call(method, request, PROBE_S)


class Upstreams:
    """All servers, looked at as long as the `async with` block lasts."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.each = [Upstream(address) for address in addresses]
        self.num_moved = 0  # requests that a server refused and another one got
        self._ring = HashRing(len(addresses))
        self._watches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Upstreams:
        for one in self.each:
            await one.open()
        self._watches = [asyncio.create_task(_watch(one)) for one in self.each]
        return self

    async def __aexit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for one in self.each:
            await one.close()

    async def look_again(self) -> None:
        """See `Upstream.look_again`."""
        await asyncio.gather(*(one.look_again() for one in self.each))

    @property
    def models(self) -> list[str]:
        return sorted(frozenset[str]().union(*(one.models for one in self.each)))

    @property
    def not_ready(self) -> str:
        """Return why no server takes requests; empty if one does."""
        reasons = [one.not_ready for one in self.each]
        return "" if "" in reasons else "; ".join(reasons)

    def model(self, name: str) -> str:
        """Return the name of the model that is meant. Raise `NotFound` or `ServerUnavailable`."""
        models = self.models
        if name in models:
            return name
        if not models:
            raise ServerUnavailable(f"no model is ready: {self.not_ready or 'none is loaded'}")
        if name or len(models) > 1:
            raise NotFound(f"model is {name!r}: served {'are' if len(models) > 1 else 'is'} {', '.join(models)}")
        return models[0]

    async def stream(self, request: pb.ModelInferRequest, session: str) -> AsyncGenerator[list[Chunk]]:
        """Yield the news of each response, of the first server that does not refuse. Raise `RequestError`."""
        refused: list[int] = []
        while True:
            index = self._choose(request.model_name, session, refused)
            has_begun = False
            try:
                async with contextlib.aclosing(self.each[index].stream(request)) as responses:
                    async for chunks in responses:
                        has_begun = True
                        yield chunks
                return
            except RequestError as error:
                if isinstance(error, ServerUnavailable):
                    self.each[index].not_ready = str(error)  # until the next look
                refused.append(index)
                if has_begun or not error.retryable or not self._ready(request.model_name, refused):
                    raise
                self.num_moved += 1

    def _choose(self, model: str, session: str, refused: Sequence[int]) -> int:
        """Return the server of the session, or the least loaded one. Raise `ServerUnavailable`."""
        ready = self._ready(model, refused)
        if not ready:
            raise ServerUnavailable(f"no server of model {model!r} is ready: {self.not_ready or 'none has it'}")
        own = self._ring.first(session, lambda index: index in ready) if session else None
        return min(ready, key=lambda index: self.each[index].num_open) if own is None else own

    def _ready(self, model: str, refused: Sequence[int]) -> list[int]:
        every = enumerate(self.each)
        return [index for index, one in every if not one.not_ready and model in one.models and index not in refused]


async def _watch(upstream: Upstream) -> None:
    while True:
        await upstream.look()
        await asyncio.sleep(LOOK_S)
