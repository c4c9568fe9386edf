"""`/playground`: a page that asks the gateway's own API. It loads nothing from elsewhere, and needs no key itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import msgspec
from aiohttp import web

from tidewheel.errors import BY_TAG, cause_and_remedy

ROOT, PAGE = "/", "/playground"
_FOLDER = Path(__file__).with_name("playground")
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".json": "application/json"}
_HEADERS = MappingProxyType(
    {
        # Nothing but what this gateway serves, no script within the page, and no frame around it.
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
)


def routes() -> Iterator[web.RouteDef]:
    """Yield a route for each file, which is read now, and one from `/` to the page."""
    yield web.get(ROOT, _to_page)
    for path in sorted(_FOLDER.iterdir()):
        url = PAGE if path.name == "index.html" else f"{PAGE}/{path.name}"
        yield _route(url, path.read_bytes(), _KINDS[path.suffix])
    remedies = {tag: cause_and_remedy(cls)[1] for tag, cls in BY_TAG.items()}
    yield _route(f"{PAGE}/errors.json", msgspec.json.encode(remedies), _KINDS[".json"])


def is_open(path: str) -> bool:
    """Return whether it is the playground's, which everyone may read: with it comes no key and no answer."""
    return path in (ROOT, PAGE) or path.startswith(f"{PAGE}/")


async def _to_page(_: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": PAGE})


def _route(url: str, body: bytes, kind: str) -> web.RouteDef:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    return web.get(url, answer)
