import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import psutil

from tidewheel.engine.connection import ask
from tidewheel.engine.folder import label_of, model_label, read_serving
from tidewheel.engine.messages import MAX_LISTED, CancelReply, CancelRequest, ListRequests, RequestList, RequestRow
from tidewheel.metrics import LORA_REQUESTS, RECEIVED, TENANT_REQUESTS
from tidewheel.server.endpoints import is_loopback
from tidewheel.server.workdir import current_engines_of
from tidewheel.top import TopError, server_view
from tidewheel.top.server_view import PageChange, RankLine, RequestLine, ServerView, figures_of_model, label_values
from tidewheel.top.view_text import verdict
from tidewheel_client.errors import InvalidRequest, RequestError
from tidewheel_client.facade import run
from tidewheel_client.server_pages import Figures, ServerPages, read_figures

WINDOW_S = 10.0  # of rates
ANSWER_S = 1.0  # time limit of an engine
ELSEWHERE = "requests are listed on the server's own machine alone"
NOT_OURS = "no engine of this user is here: requests are listed for the user who runs the server"
TWIN = "requests are listed under the model that has the engine"
SILENT = "an engine does not answer: its requests are not listed"
_UNKNOWN = "unknown"  # state without an answer of /ready
_NO_CHANGE = PageChange(Figures(()), Figures(()), 0.0)
_START = "start a server with 'tidewheel serve', or name its addresses with --metrics-url and --health-url"


Pages = deque[tuple[float, Figures]]  # each with the seconds at which it was read


class RequestListing(NamedTuple):
    requests: list[RequestLine] | None  # the oldest of each engine; None: `note` says why
    num_sequences: int = 0
    note: str = ""
    ranks: tuple[RankLine, ...] = ()


def list_here(metrics_url: str, model: str) -> RequestListing:
    """Return requests of `model` (empty: all) in this machine's engines behind the metrics."""
    address = urlsplit(metrics_url)
    if not is_loopback(address.hostname or ""):
        return RequestListing(None, note=ELSEWHERE)
    engines = current_engines_of(address.port or 80)
    own = [link for link in engines if not model or label_of(link) == model_label(model)]
    if not own:
        return RequestListing(None, note=TWIN if engines else NOT_OURS)
    answers = [(link.resolve(), ask(link, ListRequests(MAX_LISTED), RequestList, ANSWER_S)) for link in own]
    lines = [_line(str(folder), one.pid, row) for folder, one in answers if one is not None for row in one.rows]
    total = sum(one.num_sequences for _, one in answers if one is not None)
    is_whole = all(one is not None for _, one in answers)
    ranks = [
        RankLine(model=label_of(link), rank=rank, device=device, pid=pid)
        for link in own
        if (status := read_serving(link)) is not None
        for rank, (pid, device) in enumerate(status.ranks)
    ]
    return RequestListing(lines if lines or is_whole else None, total, "" if is_whole else SILENT, tuple(ranks))


def cancel(request: RequestLine) -> str:
    """Cancel a request. Return a sentence with the outcome."""
    name = request.request_id or f"number {request.number}"
    message = CancelRequest(request.engine_pid, request.number)
    if (reply := ask(Path(request.engine), message, CancelReply, ANSWER_S)) is None:
        return f"the engine does not answer: request {name} was not cancelled"
    return f"request {name} was cancelled" if reply.was_there else f"request {name} had ended before"


@dataclass(eq=False, repr=False)  # a traceback of the terminal app shows locals
class ServerWatch:
    """Metrics of the last `WINDOW_S`, as views. One thread calls `look`, which blocks."""

    server: ServerPages
    model: str = ""  # empty: all
    gateway_url: str = ""  # of its metrics; empty: there is none
    api_key: str = ""  # for the gateway
    list_requests: Callable[[str, str], RequestListing] = list_here
    clock: Callable[[], float] = time.monotonic
    _pages: Pages = field(default_factory=deque, init=False)
    _gateway_pages: Pages = field(default_factory=deque, init=False)
    _processes: dict[int, psutil.Process] = field(default_factory=dict, init=False)  # of ranks

    def look(self) -> ServerView:
        """Read the server's pages into a view. Raise `TopError` without metrics or model."""
        is_ready, state, reason = self._health()
        change = self._change(self._pages, self._of_model(self._metrics(state, reason)))
        gateway, gateway_problem = self._gateway()
        listing = self.list_requests(self.server.metrics_url, self.model)
        view = ServerView(
            server=self.server.metrics_url,
            models=label_values(change.after, RECEIVED, "model"),
            is_ready=is_ready,
            state=state,
            reason=reason,
            traffic=server_view.read(server_view.Traffic, change),
            classes=server_view.classes(change, listing.requests),
            tenants=server_view.busiest(change, server_view.TenantLine, TENANT_REQUESTS, "tenant"),
            loras=server_view.busiest(change, server_view.LoraLine, LORA_REQUESTS, "lora"),
            cache=server_view.read(server_view.CacheLine, change),
            steps=server_view.read(server_view.StepLine, change),
            errors=server_view.errors(change, gateway or _NO_CHANGE),
            gateway=server_view.read(server_view.GatewayLine, gateway) if gateway is not None else None,
            gateway_problem=gateway_problem,
            requests=listing.requests or [],
            num_sequences=listing.num_sequences,
            requests_note=listing.note,
            ranks=[self._measured(one) for one in listing.ranks],
        )
        view.summary = verdict(view)
        return view

    def _measured(self, rank: RankLine) -> RankLine:
        with contextlib.suppress(psutil.Error):  # it has ended
            is_new = rank.pid not in self._processes
            process = self._processes.setdefault(rank.pid, psutil.Process(rank.pid))
            used = process.cpu_percent()  # since the last look
            rank.memory_bytes, rank.busy = process.memory_info().rss, None if is_new else used / 100
        return rank

    def _health(self) -> tuple[bool | None, str, str]:
        try:
            health = run(self.server.health())
        except RequestError as error:
            return None, _UNKNOWN, str(error)
        return health.is_ready, health.state, health.reason

    def _metrics(self, state: str, reason: str) -> Figures:
        try:
            return run(self.server.metrics())
        except InvalidRequest as error:
            raise TopError(error.message) from None
        except RequestError as error:
            if state == _UNKNOWN:
                raise TopError(f"{error}, nor does one at {self.server.health_url}: {_START}") from None
            raise TopError(f"{error}; the server is {state} ({reason or 'no reason given'})") from None

    def _gateway(self) -> tuple[PageChange | None, str]:
        if not self.gateway_url:
            return None, ""
        try:
            return self._change(self._gateway_pages, read_figures(self.gateway_url, self.api_key)), ""
        except RequestError as error:
            return None, str(error)

    def _of_model(self, figures: Figures) -> Figures:
        url, model, known = self.server.metrics_url, self.model, label_values(figures, RECEIVED, "model")
        if not known:
            raise TopError(
                f"{url} has no figures of tidewheel: no model of this backend is loaded, or all have "
                "REPORT_CUSTOM_METRICS false or disable_log_stats true (docs/metrics.md)"
            )
        if model and model not in (*known, *label_values(figures, RECEIVED, "model_name")):
            raise TopError(f"model {model!r} has no figures on {url}: those with figures are {', '.join(known)}")
        return figures_of_model(figures, model) if model else figures

    def _change(self, pages: Pages, figures: Figures) -> PageChange:
        now = self.clock()
        pages.append((now, figures))
        while len(pages) > 2 and now - pages[0][0] > WINDOW_S:
            pages.popleft()
        then, before = pages[0]
        return PageChange(before, figures, now - then)


def _line(engine: str, pid: int, row: RequestRow) -> RequestLine:
    since_first = 0.0 if row.first_token_s is None else row.age_s - row.first_token_s
    rate = (row.num_output_tokens - 1) / since_first if row.num_output_tokens > 1 and since_first else None
    return RequestLine(**msgspec.structs.asdict(row), engine=engine, engine_pid=pid, tokens_rate=rate)
