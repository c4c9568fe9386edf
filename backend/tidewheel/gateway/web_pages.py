"""Web pages of other origins (CORS), and the playground, static pages that call the gateway's API."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import hdrs, web

from tidewheel.errors import BY_TAG, cause_and_remedy

ROOT, PAGE = "/", "/playground"
FOLDER = Path(__file__).with_name("playground")
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS: Mapping[str, str] = {
    # Only this gateway's files, no inline script, no frame around.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
ANY_ORIGIN = "*"  # never with a browser's credentials, such as cookies
_ALLOWED = {
    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST, DELETE",
    hdrs.ACCESS_CONTROL_EXPOSE_HEADERS: "x-request-id, retry-after, retry-after-ms, x-should-retry",
    hdrs.ACCESS_CONTROL_MAX_AGE: "600",  # seconds that a preflight's answer holds
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def allow_origins(application: web.Application, origins: Collection[str]) -> None:
    """Answer preflights before `application` asks for keys, and mark all answers, streams and errors.

    Browsers let no page read an answer unless its origin is allowed.
    """

    def allowed(http: web.Request) -> str:
        """Return the origin to allow; empty without an allowed one."""
        origin = http.headers.get(hdrs.ORIGIN, "")
        return ANY_ORIGIN if origin and ANY_ORIGIN in origins else origin if origin in origins else ""

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_preflight = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        return web.Response(status=204) if is_preflight and allowed(request) else await handler(request)

    async def mark(http: web.Request, answer: web.StreamResponse) -> None:
        if ANY_ORIGIN not in origins:
            answer.headers[hdrs.VARY] = hdrs.ORIGIN
        if origin := allowed(http):
            answer.headers.update(_ALLOWED | {hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: origin})
            if asked := http.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
                answer.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked

    if origins:
        application.middlewares.insert(0, answer_preflight)
        application.on_response_prepare.append(mark)


def playground_routes() -> list[web.RouteDef]:
    # Not `web.static`: for other names, it fails or answers by itself, and they need no key.
    urls = {path: PAGE if path.name == "index.html" else f"{PAGE}/{path.name}" for path in FOLDER.iterdir()}
    files = [web.get(url, partial(_file, path)) for path, url in urls.items()]
    return [web.get(ROOT, _redirect), *files, web.get(f"{PAGE}/errors.json", _remedies)]


def is_playground(path: str) -> bool:
    return path in (ROOT, PAGE) or path.startswith(f"{PAGE}/")


async def _redirect(_: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": PAGE})


async def _file(path: Path, _: web.Request) -> web.FileResponse:
    return web.FileResponse(path, headers={"Content-Type": f"{_KINDS[path.suffix]}; charset=utf-8"})


async def _remedies(_: web.Request) -> web.Response:
    remedies = {tag: cause_and_remedy(cls)[1] for tag, cls in BY_TAG.items()}
    return web.Response(body=msgspec.json.encode(remedies), content_type="application/json", charset="utf-8")
