"""`/playground`: static files that ask the gateway's own API."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import msgspec
from aiohttp import web

from tidewheel.errors import BY_TAG, cause_and_remedy

ROOT, PAGE = "/", "/playground"
FOLDER = Path(__file__).with_name("playground")
HEADERS = MappingProxyType(
    {
        # Only this gateway's files, no inline script, no frame around.
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
)


def routes() -> list[web.AbstractRouteDef]:
    return [
        web.get(ROOT, _redirect),
        web.get(PAGE, _page),
        web.get(f"{PAGE}/errors.json", _remedies),
        web.static(PAGE, FOLDER),
    ]


def is_playground(path: str) -> bool:
    """Return whether the path needs no key."""
    return path in (ROOT, PAGE) or path.startswith(f"{PAGE}/")


async def _redirect(_: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": PAGE})


async def _page(_: web.Request) -> web.FileResponse:
    return web.FileResponse(FOLDER / "index.html")


async def _remedies(_: web.Request) -> web.Response:
    remedies = {tag: cause_and_remedy(cls)[1] for tag, cls in BY_TAG.items()}
    return web.Response(body=msgspec.json.encode(remedies), content_type="application/json", charset="utf-8")
