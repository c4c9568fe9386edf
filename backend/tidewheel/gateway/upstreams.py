"""Servers behind the gateway, and which one gets a request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import NamedTuple

from tritonclient.grpc import service_pb2 as pb

from tidewheel.fleet.prefix_router import PrefixAware
from tidewheel.fleet.router import RouteRequest
from tidewheel.gateway.routing import cached_tokens
from tidewheel.gateway.upstream import LOOK_S, Address, Upstream, watch
from tidewheel_client import Chunk
from tidewheel_client.request_errors import NotFound, RequestError, ServerUnavailable

RESOLVE_S = 2.0  # between two questions for the servers of a name


class Upstreams:
    """All servers, looked at as long as the `async with` block lasts.

    Those of a name come and go as it says. One that is gone gets no more requests, and ends those that it has.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._members: dict[str, _Member] = {}  # by authority
        self._router = PrefixAware[str]()
        self._tasks: set[asyncio.Task[None]] = set()  # that follow names, and servers that are gone
        self.num_moved = 0  # requests that a server refused and another one got

    async def __aenter__(self) -> Upstreams:
        for address in self._addresses:
            if address.is_name_of_many:
                await self._resolve(address)
                self._start(self._follow(address))
            else:
                await self._add(address, name="")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._tasks, *(member.watch for member in self._members.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self.each:
            await one.close()

    @property
    def each(self) -> list[Upstream]:
        return [member.upstream for member in self._members.values()]

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
        if not reasons:
            return "; ".join(f"{address.grpc} has no address" for address in self._addresses)
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

    async def stream(self, request: pb.ModelInferRequest, route: RouteRequest) -> AsyncGenerator[list[Chunk]]:
        """Yield the news of each response, of the first server that does not refuse. Raise `RequestError`."""
        refused: list[Upstream] = []
        while True:
            one = self._choose(request.model_name, route, refused)
            has_begun = False
            try:
                async with contextlib.aclosing(self._counted(one, request, route)) as responses:
                    async for chunks in responses:
                        has_begun = True
                        yield chunks
                return
            except RequestError as error:
                if isinstance(error, ServerUnavailable):
                    one.not_ready = str(error)  # until the next look
                refused.append(one)
                if has_begun or not error.retryable or not self._ready(request.model_name, refused):
                    raise
                self.num_moved += 1

    async def _counted(
        self, one: Upstream, request: pb.ModelInferRequest, route: RouteRequest
    ) -> AsyncGenerator[list[Chunk]]:
        """Yield the news of one server, and tell the router how the request fares."""
        flight = self._router.chosen(route, one.address.grpc)
        num_cached: int | None = None
        try:
            async with contextlib.aclosing(one.stream(request)) as responses:
                async for chunks in responses:
                    self._router.started(flight)
                    if (found := cached_tokens(chunks, route)) is not None:
                        num_cached = found
                    yield chunks
        finally:
            self._router.ended(flight, num_cached)

    def _choose(self, model: str, route: RouteRequest, refused: Sequence[Upstream]) -> Upstream:
        """Return the server that the router chooses of those that are ready. Raise `ServerUnavailable`."""
        ready = {one.address.grpc for one in self._ready(model, refused)}
        chosen = self._router.choose(route, excluded=self._members.keys() - ready)
        if chosen is None:
            raise ServerUnavailable(f"no server of model {model!r} is ready: {self.not_ready or 'none has it'}")
        return self._members[chosen].upstream

    def _ready(self, model: str, refused: Sequence[Upstream]) -> list[Upstream]:
        return [one for one in self.each if not one.not_ready and model in one.models and one not in refused]

    # --- members ----------------------------------------------------------------------------------------------

    async def _follow(self, name: Address) -> None:
        while True:
            await asyncio.sleep(RESOLVE_S)
            await self._resolve(name)

    async def _resolve(self, name: Address) -> None:
        """Take in the servers that a name has now. A name service that fails leaves those that are known."""
        host, _, port = name.grpc.rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError:
            return
        addresses = {address.grpc: address for address in (name.at(str(info[4][0])) for info in found)}
        for authority in addresses.keys() - self._members.keys():
            await self._add(addresses[authority], name.grpc)
        for authority, member in list(self._members.items()):
            if member.name == name.grpc and authority not in addresses:
                self._remove(authority)

    async def _add(self, address: Address, name: str) -> None:
        upstream = Upstream(address)
        await upstream.open()
        self._members[address.grpc] = _Member(upstream, name, asyncio.create_task(watch(upstream)))
        self._router.join(address.grpc)

    def _remove(self, authority: str) -> None:
        member = self._members.pop(authority)
        self._router.leave(authority)
        member.watch.cancel()
        self._start(_close_when_idle(member.upstream))

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Member(NamedTuple):
    upstream: Upstream
    name: str  # that it was found by; empty: it was given itself
    watch: asyncio.Task[None]


async def _close_when_idle(upstream: Upstream) -> None:
    try:
        while upstream.num_open:
            await asyncio.sleep(LOOK_S)
    finally:
        await upstream.close()
