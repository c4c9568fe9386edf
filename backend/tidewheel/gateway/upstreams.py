"""Servers behind the gateway, and which one gets a request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tritonclient.grpc import service_pb2 as pb

from tidewheel.fleet.router import RoutedRequest, Router, RouteRequest
from tidewheel.fleet.routers import PrefixAware
from tidewheel.gateway.course import Course
from tidewheel.gateway.order import Order
from tidewheel.gateway.routing import cached_tokens
from tidewheel.gateway.upstream import LOOK_S, Address, Passed, Upstream, watch
from tidewheel_client import Chunk
from tidewheel_client.errors import EngineDead, NotFound, RequestError, ServerUnavailable

R = TypeVar("R")  # a request as it is sent
N = TypeVar("N")  # news of its answer
RESOLVE_S = 2.0  # between two questions for the servers of a name


class NoServer(ServerUnavailable):
    """There is none that could be asked."""


class Upstreams:
    """All servers, looked at as long as the `async with` block lasts.

    Those of a name come and go as it says. One that is gone gets no more requests, and ends those that it has.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._members: dict[str, _Member] = {}  # by authority
        self._router: Router[str] = PrefixAware()
        self._tasks: set[asyncio.Task[None]] = set()  # that follow names, and servers that are gone
        self.num_moved = 0  # requests that a server refused and another one got

    async def __aenter__(self) -> Upstreams:
        for address in self._addresses:
            if address.is_name_of_many:
                await self._resolve(address)
                self._run(self._follow(address))
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

    def stream(
        self, order: Order[pb.ModelInferRequest], route: RouteRequest, request: pb.ModelInferRequest
    ) -> AsyncGenerator[list[Chunk]]:
        """Return the news of each response. See `_deliver`."""
        return self._deliver(route, Course(order, request, Upstream.stream), cached_tokens)

    def generate(self, order: Order[Passed], route: RouteRequest, request: Passed) -> AsyncGenerator[bytes]:
        """Return what Triton answers by HTTP. See `_deliver`."""
        return self._deliver(route, Course(order, request, Upstream.generate), lambda *_: None)

    async def _deliver(
        self, route: RouteRequest, course: Course[R, N], cached: Callable[[N, RouteRequest], int | None]
    ) -> AsyncGenerator[N]:
        """Yield what the first server sends that does not refuse. Raise `RequestError`.

        What has brought no news goes to another server, in its class and with the time that its deadline leaves.
        """
        refused: list[Upstream] = []
        while True:
            try:
                async with contextlib.aclosing(self._ask(route, course, cached, refused)) as responses:
                    async for news in responses:
                        yield news
                return
            except RequestError as error:
                if not self._moves(course, refused, error):
                    raise (_cut(error) if course.has_begun else error) from None
            self.num_moved += 1
            course.move()

    async def _ask(
        self,
        route: RouteRequest,
        course: Course[R, N],
        cached: Callable[[N, RouteRequest], int | None],
        refused: list[Upstream],
    ) -> AsyncGenerator[N]:
        """Yield what one server sends, which is among the `refused` after an error."""
        async with self._held(course.order, route, refused) as place:
            try:
                async with contextlib.aclosing(course.send(place.upstream)) as responses:
                    async for news in responses:
                        if not place.flight.has_started:
                            await self._begin(place)
                        if (found := cached(news, route)) is not None:
                            place.num_cached = found
                        course.has_begun = True
                        yield news
            except RequestError as error:
                if isinstance(error, ServerUnavailable):
                    place.upstream.not_ready = str(error)  # until the next look
                refused.append(place.upstream)
                raise

    def _moves(self, course: Course[R, N], refused: list[Upstream], error: RequestError) -> bool:
        """Return whether the request goes to another server after the error."""
        if isinstance(error, NoServer) or not error.retryable or not course.may_move:
            return False
        return self._may_move(course.order.ask.model, refused, error)

    @contextlib.asynccontextmanager
    async def _held(
        self, order: Order[object], route: RouteRequest, refused: Sequence[Upstream]
    ) -> AsyncIterator[Place]:
        """Hold a place at the server for the request. Raise `ServerUnavailable`."""
        authority = self._router.choose(route, self._unfit(order.ask.model, refused))
        if authority is None:
            raise self._no_server(order.ask.model)
        place = Place(self._members[authority].upstream, self._router.chosen(route, authority))
        try:
            yield place
        finally:
            self._router.ended(place.flight, place.num_cached)

    async def _begin(self, place: Place) -> None:
        """Note the first news, before it is passed on. Raise `RequestError` if it must not be."""
        self._router.started(place.flight)

    def _may_move(self, model: str, refused: list[Upstream], error: RequestError) -> bool:  # noqa: ARG002
        """Return whether another server may take what one has refused with the error."""
        return len(self._unfit(model, refused)) < len(self._members)

    def _unfit(self, model: str, refused: Sequence[Upstream]) -> set[str]:
        """Return the servers that cannot take a request."""
        each = list(self._members.items())  # other threads may ask
        return {
            authority for authority, (one, *_) in each if one.not_ready or model not in one.models or one in refused
        }

    def _no_server(self, model: str) -> NoServer:
        return NoServer(f"no server of model {model!r} is ready: {self.not_ready or 'none has it'}")

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
        self._run(_close_when_idle(member.upstream))

    def _run(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(slots=True)
class Place:
    """Place of a request at a server while it is answered."""

    upstream: Upstream
    flight: RoutedRequest[str]
    num_cached: int | None = None  # of the prompt's tokens, as the server says


class _Member(NamedTuple):
    upstream: Upstream
    name: str  # that it was found by; empty: it was given itself
    watch: asyncio.Task[None]


def _cut(error: RequestError) -> RequestError:
    """Return the error of a request that has brought news. It has a tag."""
    if isinstance(error, ServerUnavailable):
        return EngineDead(f"the server was lost while it answered: {error.message}")
    return error


async def _close_when_idle(upstream: Upstream) -> None:
    try:
        while upstream.num_open:
            await asyncio.sleep(LOOK_S)
    finally:
        await upstream.close()
