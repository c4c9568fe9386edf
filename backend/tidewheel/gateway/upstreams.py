"""Servers behind the gateway: the choice for an attempt, and after a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tidewheel.fleet.router import RoutedRequest, Router
from tidewheel.fleet.routers import PrefixAware
from tidewheel.gateway.upstream import Address, Upstream
from tidewheel.gateway.upstream_request import Attempt, R
from tidewheel_client.errors import EngineDead, NotFound, RequestError, ServerUnavailable

RESOLVE_S = 2.0  # between resolutions of a name
AT_ONCE = 64  # prompts of one request at servers
ALIKE_S = 1.0  # for the other prompts after an error


class NoServer(ServerUnavailable):
    """No server could be asked."""


@dataclass(slots=True)
class UpstreamLease:
    """Server of a request, until the end of the answer."""

    upstream: Upstream
    routed: RoutedRequest[str]
    num_cached: int | None = None  # prompt tokens, reported by the server


class Upstreams:
    """All servers, watched within the `async with` block.

    Servers of a name follow the name service; a removed server ends its requests.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._members: dict[str, _Member] = {}  # by authority
        self._router: Router[str] = PrefixAware()
        self._tasks: set[asyncio.Task[None]] = set()  # of names, and of removed servers
        self.num_moved = 0  # requests retried on another server

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
        await asyncio.gather(*(one.look_again() for one in self.each))

    @property
    def models(self) -> list[str]:
        return sorted(frozenset[str]().union(*(one.models for one in self.each)))

    @property
    def not_ready(self) -> str:
        """Reason why no server takes requests; empty if one does."""
        reasons = [one.not_ready for one in self.each]
        if not reasons:
            return "; ".join(f"{address.grpc} has no address" for address in self._addresses)
        return "" if "" in reasons else "; ".join(reasons)

    def model(self, name: str) -> str:
        """Return the name, or the only model for no name. Raise `NotFound` or `ServerUnavailable`."""
        models = self.models
        if name in models:
            return name
        if not models:
            raise ServerUnavailable(f"no model is ready: {self.not_ready or 'none is loaded'}")
        if name or len(models) > 1:
            raise NotFound(f"model is {name!r}: served {'are' if len(models) > 1 else 'is'} {', '.join(models)}")
        return models[0]

    # --- requests ---------------------------------------------------------------------------------------------

    async def deliver_all(self, attempts: Sequence[Attempt[R]]) -> AsyncGenerator[tuple[int, R]]:
        """Yield `(prompt_index, response)` as they arrive. Raise the first `RequestError`."""
        if len(attempts) == 1:
            async with contextlib.aclosing(self.deliver(attempts[0])) as responses:
                async for response in responses:
                    yield 0, response
            return
        turns = asyncio.Semaphore(AT_ONCE)
        arrived: asyncio.Queue[tuple[int, R] | RequestError | None] = asyncio.Queue(len(attempts))

        async def read(attempt: Attempt[R]) -> None:
            try:
                async with turns, contextlib.aclosing(self.deliver(attempt)) as responses:
                    async for response in responses:
                        await arrived.put((attempt.index, response))
                await arrived.put(None)
            except RequestError as error:
                await arrived.put(error)

        readers = [asyncio.create_task(read(attempt)) for attempt in attempts]
        try:
            num_left = len(readers)
            while num_left:
                item = await arrived.get()
                if isinstance(item, RequestError):
                    # Others may fail alike, and server 2.51 can die if a stream is cancelled as its error is sent.
                    await asyncio.wait(readers, timeout=ALIKE_S)
                    raise item
                if item is None:
                    num_left -= 1
                else:
                    yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def deliver(self, attempt: Attempt[R]) -> AsyncGenerator[R]:
        """Yield responses, retrying on other servers until one is delivered. Raise `RequestError`."""
        while True:
            try:
                async with self._lease(attempt) as lease, attempt.sent_to(lease.upstream) as responses:
                    async for response in responses:
                        if not attempt.has_delivered:
                            self._router.started(lease.routed)
                            attempt.has_delivered = True
                        if (num_cached := attempt.cached_tokens(response)) is not None:
                            lease.num_cached = num_cached
                        yield response
                return
            except RequestError as error:
                if attempt.has_delivered:
                    raise _cut(error) from None
                if isinstance(error, NoServer) or not error.retryable or not self._may_retry(attempt, error):
                    raise
            self.num_moved += 1
            attempt.encode_again()

    @contextlib.asynccontextmanager
    async def _lease(self, attempt: Attempt[R]) -> AsyncIterator[UpstreamLease]:
        """Raise `NoServer`."""
        authority = self._router.choose(attempt.route, self._unfit(attempt))
        if authority is None:
            raise self._no_server(attempt)
        lease = UpstreamLease(self._members[authority].upstream, self._router.chosen(attempt.route, authority))
        try:
            yield lease
        finally:
            self._router.ended(lease.routed, lease.num_cached)

    def _may_retry(self, attempt: Attempt[R], error: RequestError) -> bool:  # noqa: ARG002
        return len(self._unfit(attempt)) < len(self._members)

    def _unfit(self, attempt: Attempt[R]) -> set[str]:
        model = attempt.request.model
        return {
            authority
            for authority, (one, *_) in self._members.items()
            if one.not_ready or model not in one.models or one in attempt.refused
        }

    def _no_server(self, attempt: Attempt[R]) -> NoServer:
        model = attempt.request.model
        return NoServer(f"no server of model {model!r} is ready: {self.not_ready or 'none has it'}")

    # --- members ----------------------------------------------------------------------------------------------

    async def _follow(self, name: Address) -> None:
        while True:
            await asyncio.sleep(RESOLVE_S)
            await self._resolve(name)

    async def _resolve(self, name: Address) -> None:
        """Update the servers of a name; keep them if the name service fails."""
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
        self._members[address.grpc] = _Member(upstream, name, asyncio.create_task(upstream.watch()))
        self._router.join(address.grpc)

    def _remove(self, authority: str) -> None:
        member = self._members.pop(authority)
        self._router.leave(authority)
        member.watch.cancel()
        self._run(member.upstream.close_when_idle())

    def _run(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Member(NamedTuple):
    upstream: Upstream
    name: str  # that resolved to the server, if any
    watch: asyncio.Task[None]


def _cut(error: RequestError) -> RequestError:
    """Return the tagged error of an answer that has begun."""
    if isinstance(error, ServerUnavailable):
        return EngineDead(f"the server was lost while it answered: {error.message}")
    return error
