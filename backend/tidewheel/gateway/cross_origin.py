"""Requests of other origins' web pages (CORS). Browsers let no page read an answer unless its origin is allowed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from aiohttp import hdrs, web

ANY = "*"  # every page; never with a browser's credentials, such as cookies
_ALLOWED = {
    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE",
    hdrs.ACCESS_CONTROL_EXPOSE_HEADERS: "x-request-id, retry-after, retry-after-ms, x-should-retry",
    hdrs.ACCESS_CONTROL_MAX_AGE: "600",  # seconds that a preflight's answer holds
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AllowedOrigins:
    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def install(self, application: web.Application) -> None:
        """Answer preflights before `application` asks for keys, and mark all answers, streams and errors."""
        if self._origins:
            application.middlewares.insert(0, self._preflight)
            application.on_response_prepare.append(self._mark)

    @web.middleware
    async def _preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        return web.Response(status=204) if is_preflight and self._allowed(request) else await handler(request)

    async def _mark(self, http: web.Request, answer: web.StreamResponse) -> None:
        if ANY not in self._origins:
            answer.headers[hdrs.VARY] = hdrs.ORIGIN
        if allowed := self._allowed(http):
            answer.headers.update(_ALLOWED | {hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: allowed})
            if asked := http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
                answer.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked

    def _allowed(self, http: web.Request) -> str:
        """Return the origin to allow; empty without an allowed one."""
        origin = http.headers.get(hdrs.ORIGIN, "")
        return ANY if origin and ANY in self._origins else origin if origin in self._origins else ""
