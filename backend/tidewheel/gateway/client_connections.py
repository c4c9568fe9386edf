"""Limits of client connections: their number, and the time to send headers.

At the limit, a new connection replaces the longest idle one, else the longest stalled one (request incomplete or
answer unread). If all wait for answers, it is refused.
"""

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from aiohttp import web

from tidewheel.confidential import TracebackFormatter
from tidewheel.gateway import errors
from tidewheel.gateway.gateway_options import GatewayOptions
from tidewheel.server import ServeError
from tidewheel_client.errors import Busy
from tidewheel_process.current_process import raise_descriptor_limit

HEADERS_S = 10.0
_KEEPALIVE_S = 75.0
_OPTIONS: dict[str, Any] = {"access_log": None, "auto_decompress": False, "keepalive_timeout": _KEEPALIVE_S}
_LOG_INTERVAL_S = 10.0
_OWN_DESCRIPTORS = 32  # without clients
_BACKLOG = 1024  # connections in the kernel
_MOST_AT_ONCE = 128  # accepted before asyncio serves one
_IPV6_SITE = 64  # bits of one client's network
_ALL = ""  # key of all connections

_Activity = Literal["idle", "stalled", "served"]

logger = logging.getLogger(__name__)


class ConnectionTable:
    """Open connections of a process, by activity: idle, stalled or served. Not thread-safe."""

    def __init__(self, num_descriptors: int) -> None:
        """`num_descriptors`: limit of open files. A quarter stays free for upstreams and peaks."""
        self.most = max(num_descriptors * 3 // 4 - _OWN_DESCRIPTORS, 2)
        self.most_of_address = self.most // 2
        self._open: set[ClientConnection] = set()
        # By address, and of `_ALL`; by activity; longest first.
        self._groups: dict[str, dict[_Activity, dict[ClientConnection, None]]] = {}
        self._num_closed = self._num_refused = 0  # since the last log line
        self._next_line_s = 0.0

    def enter(self, connection: "ClientConnection") -> bool:
        """Add a connection, closing another if needed. Return False if none can be closed."""
        for address, most in ((connection.address, self.most_of_address), (_ALL, self.most)):
            if sum(map(len, self._groups.get(address, {}).values())) >= most and not self.make_room(address):
                self._num_refused += 1
                self._log()
                return False
        self._open.add(connection)
        self.note(connection, "stalled")
        return True

    def leave(self, connection: "ClientConnection") -> None:
        self.note(connection, None)
        self._open.discard(connection)

    def note(self, connection: "ClientConnection", activity: _Activity | None) -> None:
        """Set an open connection's activity; None removes the connection."""
        for address in (connection.address, _ALL) if connection in self._open else ():
            group = self._groups.setdefault(address, {"idle": {}, "stalled": {}, "served": {}})
            for connections in group.values():
                connections.pop(connection, None)
            if activity is not None:
                group[activity][connection] = None
            elif not any(group.values()):
                del self._groups[address]

    def make_room(self, address: str = _ALL) -> bool:
        """Close an idle or stalled connection. Return False if all wait for answers."""
        group = self._groups.get(address)
        connection = next(iter(group["idle"] or group["stalled"]), None) if group else None
        if connection is None:
            return False
        self.leave(connection)
        connection.abort()
        self._num_closed += 1
        self._log()
        return True

    def _log(self) -> None:
        if (now := time.monotonic()) < self._next_line_s:
            return
        logger.warning(
            "no room for more connections: %d without a whole request were closed, %d new ones refused; there may be "
            "%d, from one address %d (ulimit -n)",
            self._num_closed,
            self._num_refused,
            self.most,
            self.most_of_address,
        )
        self._num_closed = self._num_refused = 0
        self._next_line_s = now + _LOG_INTERVAL_S

    def refusal(self) -> bytes:
        error = Busy(
            f"the gateway has {self.most} connections, or {self.most_of_address} of your address, which wait for "
            "answers: try again later"
        )
        body = errors.openai_body(error)
        headers = errors.headers_of(error) | {"Content-Type": "application/json", "Connection": "close"}
        lines = [f"HTTP/1.1 {errors.meaning_of(error).status} Too Many Requests", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body


class ClientConnection(web.RequestHandler):
    """HTTP connection of aiohttp, with a time limit for headers."""

    __slots__ = ("_deadline", "_is_read", "_is_unread", "_request", "_table", "address")

    def __init__(self, server: web.Server, table: ConnectionTable) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **_OPTIONS)
        self._table = table
        self._request: web.Request | None = None  # being answered
        self._is_read = True  # the last request's body has arrived
        self._is_unread = False  # the answer
        self._deadline: asyncio.TimerHandle | None = None  # of headers that are arriving
        self.address = _ALL

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.address = _address_of(transport.get_extra_info("peername"))
        if self._table.enter(self):
            self._limit_headers()
        else:
            assert self.transport is not None
            self.transport.write(self._table.refusal())
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._table.leave(self)
        self._end_limit()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Other data is the rest of a body answered early, or b"", which aiohttp passes after a pause.
        if data and self._is_read and self._request is None and self._deadline is None:
            self._limit_headers()
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_unread = True
        self._table.note(self, "stalled")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_unread = False
        self._serve_if_waiting()

    async def answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._end_limit()
        self._request, self._is_read = request, False
        request.content.on_eof(self._end_reading)
        try:
            return await handler(request)
        finally:
            self._request = None
            self._table.note(self, "idle")

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _end_reading(self) -> None:
        self._is_read = True
        self._serve_if_waiting()

    def _serve_if_waiting(self) -> None:
        if self._request is not None and self._is_read and not self._is_unread:
            self._table.note(self, "served")

    def _limit_headers(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(HEADERS_S, self.abort)

    def _end_limit(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class HttpListener:
    """Listening sockets of an aiohttp application."""

    def __init__(self, runner: web.AppRunner, sockets: asyncio.Server) -> None:
        self._runner = runner
        self._sockets = sockets

    @classmethod
    async def open(
        cls, application: web.Application, options: GatewayOptions, *, shares_port: bool = False
    ) -> "HttpListener":
        """Serve the application until `cleanup`. Raise `ServeError` if the port is in use."""
        host, port, num_descriptors = options.host, options.port, raise_descriptor_limit()
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=options.drain_s)
        await runner.setup()
        server, table, loop = runner.server, ConnectionTable(num_descriptors), asyncio.get_running_loop()
        assert server is not None
        handler = server.request_handler
        made_room = asyncio.Event()  # in this iteration of the loop

        async def answer(request: Any) -> web.StreamResponse:
            connection: ClientConnection = request.protocol
            return await connection.answer(request, handler)

        def note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            # Without a free descriptor, asyncio tries up to 128 accepts before this close frees one.
            if not isinstance(context.get("exception"), OSError) or "socket" not in context:
                _log_failure(context)
            elif not made_room.is_set():
                made_room.set()
                loop.call_soon(made_room.clear)
                table.make_room()

        server.request_handler = answer
        loop.set_exception_handler(note_failure)
        at_once = max(1, min(num_descriptors // 32, _MOST_AT_ONCE))
        try:
            sockets = await loop.create_server(
                lambda: ClientConnection(server, table), host, port, backlog=at_once, reuse_port=shares_port or None
            )
        except OSError as error:
            await runner.cleanup()
            raise ServeError(f"cannot listen on {host} port {port}: {error.strerror}") from None
        for each in sockets.sockets:  # asyncio gave the kernel the same number
            with each.dup() as same:
                same.listen(_BACKLOG)
        return cls(runner, sockets)

    @property
    def addresses(self) -> list[Any]:
        return [each.getsockname() for each in self._sockets.sockets]

    async def cleanup(self) -> None:
        self._sockets.close()
        await self._runner.cleanup()


def _address_of(peer: tuple[str, int]) -> str:
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    return str(address if address.version == 4 else ipaddress.ip_network((address, _IPV6_SITE), strict=False))


def _log_failure(context: dict[str, Any]) -> None:
    lines = [context["message"]]
    if (error := context.get("exception")) is not None:
        lines.append(TracebackFormatter().formatException((type(error), error, error.__traceback__)))
    logger.error("%s", "\n".join(lines))
