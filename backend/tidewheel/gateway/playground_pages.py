"""`/playground`: static web pages that call the gateway's own API."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

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


def routes() -> list[web.RouteDef]:
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
