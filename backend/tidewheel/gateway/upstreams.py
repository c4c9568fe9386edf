import asyncio
import contextlib
import socket
from array import array
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from tidewheel.fleet.router import Router, RouteRequest, chunk_hashes
from tidewheel.fleet.routers import PrefixAwareRouter, TieredRouter
from tidewheel.gateway.bodies import UpstreamRequest
from tidewheel.gateway.gateway_options import Address
from tidewheel.gateway.upstream import PROBE_S, TASKS, Task, Upstream
from tidewheel.request import Priority
from tidewheel_client import Ask, Chunk, codec, errors
from tidewheel_client.errors import Busy, EngineDead, NotFound, RequestError, ServerUnavailable
from tidewheel_client.stream import Arrivals

RESOLVE_S = 2.0
AT_ONCE = 64  # prompts of one request at servers
ALIKE_S = 1.0  # for the other prompts after an error
BYTES_PER_TOKEN = 4  # roughly, of text; also of a token id
CHUNK_TOKENS = 256
_CHUNK_BYTES = CHUNK_TOKENS * BYTES_PER_TOKEN
_HEADERS = {"Content-Type": "application/json"}
_NO_LIMIT = aiohttp.ClientTimeout(total=None, connect=PROBE_S)


class NoServer(ServerUnavailable):
    """No server can take the request."""


class Attempt:
    """One prompt on its way to a server by gRPC, and to others until a response arrives."""

    message: Any  # for the server

    def __init__(self, request: UpstreamRequest, index: int = 0) -> None:
        self.request = request
        self.index = index
        self.route = route_request(request, index)
        self.refused: list[Upstream] = []
        self.upstream: Upstream | None = None  # the last one chosen
        self.num_cached: int | None = None  # tokens of the route, if the server has reported them
        self.queue_s: float | None = None  # likewise
        self.encode(request.params)

    def encode(self, params: Mapping[str, object]) -> None:
        self.message = codec.encode(self.ask(params))
        if self.request.traceparent:
            self.message.parameters["traceparent"].string_param = self.request.traceparent

    def ask(self, params: Mapping[str, object]) -> Ask:
        request, prompt = self.request, self.request.prompts[self.index]
        request_id = request.request_id + (f"-{self.index}" if len(request.prompts) > 1 else "")
        return Ask(model=request.model, request_id=request_id, prompt=prompt, params=params, stream=request.stream)

    async def send(self, upstream: Upstream) -> AsyncGenerator[list[Any]]:
        """Send the message; yield lists of chunks. Raise `RequestError`. An early close cancels the request."""
        responses = upstream.triton.send(self.message)
        arrivals = Arrivals()
        try:
            while (response := await responses.receive()) is not None:
                if chunks := arrivals.take(response):
                    self._read_cached(chunks)
                    yield chunks
            if not arrivals.is_over:
                raise ServerUnavailable("the stream ended before its last response")
        finally:
            responses.cancel()

    def _read_cached(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if chunk.perf is not None and chunk.index == 0 and chunk.num_input_tokens:
                num_lora = CHUNK_TOKENS if self.request.lora else 0  # `_lora_chunk`
                num_tokens = (self.route.num_tokens - num_lora) * chunk.perf.num_cached_tokens
                self.num_cached = num_lora + num_tokens // chunk.num_input_tokens
                self.queue_s = (chunk.perf.first_scheduled_time_ns - chunk.perf.arrival_time_ns) / 1e9


class ProxyAttempt(Attempt):
    """Attempt over Triton's HTTP; each response is a list of parts of the body."""

    def encode(self, params: Mapping[str, object]) -> None:
        self.message = msgspec.json.encode({**self.request.prompts[0], **params})

    async def send(self, upstream: Upstream) -> AsyncGenerator[list[bytes]]:
        server, model = upstream.address, self.request.model
        if not server.http:
            raise errors.Unsupported(f"the HTTP port of {server.grpc} is not known here: name it, with http=PORT")
        method = "generate_stream" if self.request.stream else "generate"
        url = f"http://{server.http}/v2/models/{model}/{method}"
        try:
            async with upstream.http.post(url, data=self.message, timeout=_NO_LIMIT, headers=_HEADERS) as answer:
                if not answer.ok:
                    raise errors.from_http(answer.status, await answer.text(errors="replace"))
                async for data in answer.content.iter_any():
                    yield [data]
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnavailable(f"the connection to {server.http} was lost ({error})") from None


def route_request(request: UpstreamRequest, index: int = 0) -> RouteRequest:
    """Return a prompt's figures for the router. Tokens are estimated, without a tokenizer."""
    data = b"".join((_lora_chunk(request.lora), *map(_bytes, request.prompts[index].values())))
    params, priority = request.params, Priority.NORMAL
    with contextlib.suppress(KeyError):  # the server refuses it
        priority = Priority.from_wire(params.get("priority", 0))
    session, tenant, salt = (params.get(name, "") for name in ("session_id", "tenant", "cache_salt"))
    return RouteRequest(
        session=f"{tenant}\0{session}" if session and isinstance(session, str) else "",
        priority=priority,
        num_tokens=max(len(data) // BYTES_PER_TOKEN, 1),
        chunks=chunk_hashes(data, _CHUNK_BYTES, str(tenant), str(salt)),
        chunk_tokens=CHUNK_TOKENS,
        due=request.due(),
        first_token_due=request.due("ttft_ms"),
        tells_start=request.stream,
    )


def _lora_chunk(lora: str) -> bytes:
    """Return a chunk that stands for an adapter, so that requests gather where it was used; empty without one."""
    return lora.encode("utf-8", "surrogatepass")[:_CHUNK_BYTES].ljust(_CHUNK_BYTES if lora else 0, b"\0")


def _bytes(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):  # audio, which shares no cached prefix
        return value[:BYTES_PER_TOKEN]
    try:
        return array("i", value).tobytes()  # type: ignore[call-overload, no-any-return]
    except (TypeError, OverflowError):
        return b""


class Upstreams:
    """All servers behind the gateway, polled within the `async with` block.

    A DNS name stands for the servers at all its addresses. A removed server finishes its requests.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._members: dict[str, Upstream] = {}  # by authority
        self._router: Router[str] = PrefixAwareRouter()
        if len({address.cost for address in addresses}) > 1:
            self._router = TieredRouter(lambda authority: self._members[authority].terms)
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_moved = 0  # requests retried on another server

    async def __aenter__(self) -> "Upstreams":
        self._set_members("", (address for address in self._addresses if not address.is_name_of_many))
        for address in self._addresses:
            if address.is_name_of_many:
                await self._resolve(address)
                self.run(self._follow(address))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in self.each:
            await one.close()

    @property
    def each(self) -> list[Upstream]:
        return list(self._members.values())

    async def look_again(self) -> None:
        await asyncio.gather(*(one.look_again() for one in self.each))

    @property
    def models(self) -> Mapping[str, Task]:
        return dict(sorted(pair for one in self.each for pair in one.models.items()))

    @property
    def not_ready(self) -> str:
        """Reason why no server is ready; empty if one is."""
        reasons = [one.not_ready for one in self.each]
        if not reasons:
            return "; ".join(f"{address.grpc} has no address" for address in self._addresses)
        return "" if "" in reasons else "; ".join(reasons)

    def model(self, name: str, tasks: Sequence[Task] = TASKS) -> tuple[str, Task]:
        """Return name and task of the model; empty: the only one. Raise `NotFound` or `ServerUnavailable`."""
        known = self.models
        models = {one: task for one, task in known.items() if task in tasks}
        if not known:
            raise ServerUnavailable(f"no model is ready: {self.not_ready or 'none is loaded'}")
        if name not in models and (name or len(models) != 1):
            served = f"served {'are' if len(models) > 1 else 'is'} {', '.join(models) or 'none'}"
            ability = "" if len(models) == len(known) else f" that can {' or '.join(tasks)}"
            raise NotFound(f"model is {name!r}: {served}{ability}")
        name = name or next(iter(models))
        return name, models[name]

    async def deliver_all(self, attempts: Sequence[Attempt]) -> AsyncGenerator[tuple[int, list[Any]]]:
        """Send all prompts. Yield `(prompt_index, response)` on arrival. Raise the first `RequestError`."""
        if len(attempts) == 1:
            async with contextlib.aclosing(self.deliver(attempts[0])) as responses:
                async for response in responses:
                    yield 0, response
            return
        turns = asyncio.Semaphore(AT_ONCE)
        arrived: asyncio.Queue[tuple[int, list[Any]] | RequestError | None] = asyncio.Queue(len(attempts))

        async def read(attempt: Attempt) -> None:
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

    async def deliver(self, attempt: Attempt) -> AsyncGenerator[list[Any]]:
        """Yield responses. After an error before the first, retry on other servers. Raise `RequestError`.

        A failed server gets no retry; a lost one gets no requests until its next poll.
        """
        while True:
            attempt.upstream = upstream = await self._choose(attempt)
            routed = self._router.chosen(attempt.route, upstream.address.grpc)
            upstream.num_open += 1
            upstream.num_sent += 1
            try:
                async with contextlib.aclosing(attempt.send(upstream)) as responses:
                    async for response in responses:
                        upstream.num_responses += 1
                        if not routed.has_started:
                            routed.waited_s = attempt.queue_s
                            self._router.started(routed)
                        yield response
                return
            except RequestError as error:
                is_lost = isinstance(error, ServerUnavailable)
                if is_lost:
                    upstream.not_ready = str(error)
                if routed.has_started and is_lost:
                    raise EngineDead(f"the server was lost while it answered: {error.message}") from None
                if routed.has_started or not error.retryable:
                    raise
                attempt.refused.append(upstream)
                refusal = error
            finally:
                upstream.num_open -= 1
                self._router.ended(routed, attempt.num_cached)
            if not await self._may_retry(attempt, refusal):
                raise refusal
            self.num_moved += 1
            attempt.encode(attempt.request.params_left())

    def pause_session(self, attempt: Attempt, called: Iterable[str]) -> None:
        """Tell the server that answered which tools the session waits for, in the background; ignore a failure."""
        request, upstream = attempt.request, attempt.upstream
        session, tenant = (request.params.get(name, "") for name in ("session_id", "tenant"))
        tools = sorted((request.calls.tools or {}).keys() & {*called})
        if tools and session and upstream is not None:
            client = upstream.client(request.model)
            self.run(client.pause_session(session, tools, tenant=tenant, timeout_s=PROBE_S))

    async def _choose(self, attempt: Attempt) -> Upstream:
        while (authority := self._router.choose(attempt.route, self._unfit(attempt))) is None:
            await self._wait(attempt)
        upstream = self._members[authority]
        if upstream.terms.cost:
            attempt.encode(attempt.request.params_left(upstream.terms.round_trip_s))
        return upstream

    async def _wait(self, attempt: Attempt) -> None:
        """Raise `NoServer`; a cluster's subclass waits for a replica."""
        model = attempt.request.model
        raise NoServer(f"no server of model {model!r} is ready: {self.not_ready or 'none has it'}")

    async def _may_retry(self, attempt: Attempt, error: RequestError) -> bool:
        if isinstance(error, Busy):
            attempt.route = attempt.route._replace(busy_cost=attempt.refused[-1].terms.cost)
        elif not self._has_fit(attempt):
            with contextlib.suppress(TimeoutError):  # a server may have become ready since its last poll
                async with asyncio.timeout(PROBE_S):
                    await asyncio.gather(*(one.look() for one in self.each if one not in attempt.refused))
        return self._has_fit(attempt)

    def _has_fit(self, attempt: Attempt) -> bool:
        return self._router.choose(attempt.route, self._unfit(attempt)) is not None

    def _unfit(self, attempt: Attempt) -> set[str]:
        model, lora = attempt.request.model, attempt.request.lora
        unfit = {
            authority
            for authority, one in self._members.items()
            if one.not_ready or model not in one.models or one in attempt.refused
        }
        if lora and (having := {name for name, one in self._members.items() if lora in one.loras.get(model, ())}):
            unfit |= self._members.keys() - having
        return unfit

    async def _follow(self, name: Address) -> None:
        while True:
            await asyncio.sleep(RESOLVE_S)
            await self._resolve(name)

    async def _resolve(self, name: Address) -> None:
        host, _, port = name.grpc.rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError:
            return
        self._set_members(name.grpc, (name.at(str(info[4][0])) for info in found))

    def _set_members(self, name: str, addresses: Iterable[Address]) -> None:
        found = {address.grpc: address for address in addresses}
        for authority, address in found.items():
            if authority not in self._members:
                self._members[authority] = Upstream(address, name)
                self._router.join(authority)
        for authority, one in list(self._members.items()):
            if one.name == name and authority not in found:
                self._router.leave(authority)
                self.run(self._members.pop(authority).close_when_idle())

    def run(self, coroutine: Coroutine[None, None, None]) -> None:
        """Run a coroutine in the background until this context ends, and ignore its `RequestError`."""

        async def run() -> None:
            with contextlib.suppress(RequestError):
                await coroutine

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
