"""Pages of a server that is not there, and what is seen on them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tidewheel.top.server_view import RankLine, RequestLine, ServerView
from tidewheel.top.watch import RequestListing, ServerWatch
from tidewheel_client import Health
from tidewheel_client.server_pages import Figures, ServerPages

RECORDED = Path(__file__).parents[2] / "top"
READY = Health(True, "ready")


class PagesOf(ServerPages):
    """Each look takes the next text; the last one stays."""

    def __init__(self, texts: Iterable[str], health: Health | Exception = READY) -> None:
        super().__init__("127.0.0.1:8001")
        self.texts = list(texts)
        self.answer = health

    async def metrics(self) -> Figures:
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        return Figures.parse(text)

    async def health(self) -> Health:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def recorded() -> list[str]:
    """Return two pages of a server under overload, ten seconds apart."""
    return [(RECORDED / f"overload_{name}.txt").read_text() for name in ("before", "after")]


def request_line(number: int, **fields: object) -> RequestLine:
    values = {
        "engine": "/run/demo-1/a", "engine_pid": 7, "number": number, "request_id": f"id-{number}",
        "priority": "normal", "tenant": "acme", "state": "running", "age_s": float(number), "waited_s": 0.1,
        "first_token_s": 0.2, "tokens_rate": 10.0, "num_prompt_tokens": 3, "num_output_tokens": 5, "max_tokens": 9,
        "num_cached_tokens": 0, "num_preemptions": 0, "num_sequences": 1,
    }  # fmt: skip
    return RequestLine(**{**values, **fields})  # type: ignore[arg-type]


def watch_of(
    pages: PagesOf,
    requests: Iterable[RequestLine] = (),
    *,
    model: str = "",
    seconds: float = 10.0,
    ranks: tuple[RankLine, ...] = (),
) -> ServerWatch:
    """Return a watch whose looks are so many seconds apart."""
    listed = RequestListing(list(requests), len(list(requests)), ranks=ranks)
    moments = iter(range(1_000_000))
    return ServerWatch(pages, model, list_requests=lambda *_: listed, clock=lambda: seconds * next(moments))


def second_look(
    *texts: str,
    requests: Iterable[RequestLine] = (),
    model: str = "",
    seconds: float = 10.0,
    ranks: tuple[RankLine, ...] = (),
) -> ServerView:
    watch = watch_of(PagesOf(texts), requests, model=model, seconds=seconds, ranks=ranks)
    for _ in texts:
        view = watch.look()
    return view
