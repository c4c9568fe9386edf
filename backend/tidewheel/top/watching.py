"""Looks at a server, again and again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tidewheel.top import TopError
from tidewheel.top.figures_of_pages import (
    FAMILY,
    cache,
    classes,
    errors,
    gateway_line,
    steps,
    tenants,
    traffic,
)
from tidewheel.top.metric_changes import Change, Page
from tidewheel.top.requests_here import Listing, list_here
from tidewheel.top.server_view import View
from tidewheel.top.verdict import verdict
from tidewheel_client.errors import InvalidRequest, RequestError
from tidewheel_client.server_pages import Figures, Health, ServerPages, read_figures

WINDOW_S = 10.0  # of rates
_START = "start a server with 'tidewheel serve', or name its addresses with --metrics-url and --health-url"


class Target(NamedTuple):
    pages: ServerPages
    model: str = ""  # empty: all
    gateway_url: str = ""  # of its metrics; empty: there is none
    api_key: str = ""  # for the gateway


class Watch:
    """Pages of the last seconds. `look` blocks; one thread calls it."""

    def __init__(
        self,
        target: Target,
        *,
        list_requests: Callable[[str, str], Listing] = list_here,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._list_requests = list_requests
        self._clock = clock
        self._pages: deque[Page] = deque()
        self._gateway_pages: deque[Page] = deque()

    def look(self) -> View:
        """Return the view of this moment. Raise `TopError` or `RequestError`."""
        target = self._target
        health = self._health()
        page = _of_model(Page(self._metrics(health), self._clock()), target)
        change = _change(self._pages, page)
        gateway, gateway_problem = self._gateway()
        listing = self._list_requests(target.pages.metrics_url, target.model)
        view = View(
            server=target.pages.metrics_url,
            models=page.labels(FAMILY, "model"),
            is_ready=None if isinstance(health, RequestError) else health.is_ready,
            state="unknown" if isinstance(health, RequestError) else health.state,
            reason=str(health) if isinstance(health, RequestError) else health.reason,
            traffic=traffic(change),
            classes=classes(change, listing.requests),
            tenants=tenants(change),
            cache=cache(change),
            steps=steps(change),
            errors=errors(change, gateway.after if gateway is not None else None),
            gateway=gateway_line(gateway) if gateway is not None else None,
            gateway_problem=gateway_problem,
            requests=listing.requests or [],
            num_sequences=listing.num_sequences,
            requests_note=listing.note,
        )
        view.summary = verdict(view)
        return view

    def _health(self) -> Health | RequestError:
        try:
            return self._target.pages.health()
        except RequestError as error:
            return error

    def _metrics(self, health: Health | RequestError) -> Figures:
        try:
            return self._target.pages.metrics()
        except InvalidRequest as error:
            raise TopError(error.message) from None
        except RequestError as error:
            if isinstance(health, RequestError):
                raise TopError(f"{error}, nor does one at {self._target.pages.health_url}: {_START}") from None
            raise TopError(f"{error}; the server is {health.state} ({health.reason or 'no reason given'})") from None

    def _gateway(self) -> tuple[Change | None, str]:
        """Return what changed, or the reason why it is unknown."""
        if not self._target.gateway_url:
            return None, ""
        try:
            figures = read_figures(self._target.gateway_url, self._target.api_key)
        except RequestError as error:
            return None, str(error)
        return _change(self._gateway_pages, Page(figures, self._clock())), ""


def _of_model(page: Page, target: Target) -> Page:
    """Return the page with the model's series alone. Raise `TopError` without figures of it."""
    known = page.labels(FAMILY, "model")
    if not known:
        raise TopError(
            f"{target.pages.metrics_url} has no figures of tidewheel: no model of this backend is loaded, or all "
            "have REPORT_CUSTOM_METRICS false or disable_log_stats true (docs/metrics.md)"
        )
    if target.model and target.model not in (*known, *page.labels(FAMILY, "model_name")):
        raise TopError(
            f"model {target.model!r} has no figures on {target.pages.metrics_url}: those with figures are "
            f"{', '.join(known)}"
        )
    return page.of_model(target.model) if target.model else page


def _change(pages: deque[Page], page: Page) -> Change:
    """Keep the page. Return the change since the oldest one within the window."""
    pages.append(page)
    while len(pages) > 2 and page.seconds - pages[0].seconds > WINDOW_S:
        pages.popleft()
    return Change(pages[0], page)
