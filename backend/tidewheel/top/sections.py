"""The view as titled tables of text, and as a page of plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tidewheel.bench.text_tables import TextTable
from tidewheel.errors import printable
from tidewheel.request import Priority
from tidewheel.top.server_view import RequestLine, View
from tidewheel.top.shown import NOTHING, bar, count, duration, number, per_second, percent

MAX_TENANTS = 8  # shown
MAX_PLAIN_REQUESTS = 20  # of --once
_INDENT = "  "


class Section(NamedTuple):
    title: str
    table: TextTable


class Order(NamedTuple):
    """An order of requests."""

    name: str
    key: Callable[[RequestLine], tuple[float | str, ...]]


ORDERS = (
    Order("slowest first", lambda one: (-one.age_s,)),
    Order("fewest tokens/s first", lambda one: (one.tokens_rate or 0.0, -one.age_s)),
    Order("most tokens first", lambda one: (-(one.num_prompt_tokens + one.num_output_tokens),)),
    Order("longest wait first", lambda one: (-one.waited_s,)),
    Order("by tenant", lambda one: (one.tenant, -one.age_s)),
    Order("by class", lambda one: (Priority[one.priority.upper()], -one.age_s)),
)
REQUEST_HEADER = [
    "class",
    "state",
    "age",
    "waited",
    "first token",
    "tokens/s",
    "out",
    "of",
    "in",
    "cached",
    "preempted",
]


def headline(view: View) -> str:
    state = {True: "ready", False: "NOT READY", None: "readiness unknown"}[view.is_ready]
    return f"tidewheel top   {view.server}   {', '.join(view.models)}   {state}"


def panels(view: View) -> list[Section]:
    return [_traffic(view), _steps(view), _cache(view)]


def tables(view: View) -> list[Section]:
    return [_classes(view), _tenants(view), _errors(view)]


def request_cells(one: RequestLine) -> list[str]:
    """Return the cells of `REQUEST_HEADER`, then tenant and id, which clients choose."""
    return [
        one.priority,
        one.state,
        duration(one.age_s),
        duration(one.waited_s),
        duration(one.first_token_s),
        number(one.tokens_rate),
        count(one.num_output_tokens),
        count(one.max_tokens),
        count(one.num_prompt_tokens),
        count(one.num_cached_tokens),
        count(one.num_preemptions),
        printable(one.tenant) or NOTHING,
        printable(one.request_id) or NOTHING,
    ]


def requests_title(view: View, order: Order) -> str:
    if view.requests_note and not view.requests:
        return f"requests: {view.requests_note}"
    note = f"; {view.requests_note}" if view.requests_note else ""
    return f"requests: {view.num_sequences} unfinished, {order.name}{note}"


def ordered(view: View, order: Order, *, is_reversed: bool = False) -> list[RequestLine]:
    return sorted(view.requests, key=order.key, reverse=is_reversed)


def as_text(view: View) -> str:
    """Return a page for people, without a terminal."""
    lines = [headline(view), view.summary, ""]
    for section in (*panels(view), *tables(view)):
        if section.table.rows:
            lines += [section.title, *_lines(section.table), ""]
    order = ORDERS[0]
    rows = [request_cells(one) for one in ordered(view, order)[:MAX_PLAIN_REQUESTS]]
    lines.append(requests_title(view, order))
    if rows:
        lines += _lines(TextTable([*REQUEST_HEADER, "tenant", "id"], rows))
    return "\n".join(lines)


def _lines(table: TextTable) -> list[str]:
    text = table.as_text().split("\n")
    return [f"{_INDENT}{line}" for line in (text if any(table.header) else text[1:])]


def _pairs(title: str, rows: Sequence[tuple[str, str]]) -> Section:
    return Section(title, TextTable(["", ""], [list(row) for row in rows], num_labels=1))


def _traffic(view: View) -> Section:
    one = view.traffic
    rows = [
        ("running / waiting", f"{count(one.running)} / {count(one.waiting)}"),
        ("received / finished", f"{per_second(one.received_rate)} / {per_second(one.finished_rate)}"),
        ("refused / failed", f"{per_second(one.refused_rate)} / {per_second(one.failed_rate)}"),
        ("tokens in / out", f"{per_second(one.prompt_tokens_rate)} / {per_second(one.output_tokens_rate)}"),
        ("first token p50/p95", f"{duration(one.first_token_p50_s)} / {duration(one.first_token_p95_s)}"),
        ("next token p50/p95", f"{duration(one.inter_token_p50_s)} / {duration(one.inter_token_p95_s)}"),
        ("queue p95", duration(one.queue_p95_s)),
        ("answers in time", percent(one.in_time)),
    ]
    if view.gateway is not None:
        gateway = view.gateway
        rows.append(("gateway open", f"{count(gateway.open_requests)}, {per_second(gateway.requests_rate)}"))
    return _pairs("traffic", rows)


def _steps(view: View) -> Section:
    one = view.steps
    rows = [
        ("busy", bar(one.busy)),
        ("time of a step", duration(one.seconds_per_step)),
        ("steps", per_second(one.rate)),
        ("tokens computed", per_second(one.tokens_rate)),
        ("tokens a step", f"{number(one.tokens_per_step)} of {count(one.token_budget)}"),
        ("rows at most", count(one.max_num_seqs)),
        ("preemptions", f"{count(one.preemptions)}, {per_second(one.preemptions_rate)}"),
        ("breaker", one.breaker or NOTHING),
    ]
    if one.restarts is not None:
        rows.append(("restarts", count(one.restarts)))
    return _pairs("steps", rows)


def _cache(view: View) -> Section:
    one = view.cache
    rows = [
        ("in use", bar(one.use)),
        ("blocks", count(one.num_blocks)),
        ("reusable blocks", count(one.cached_blocks)),
        ("tokens found", percent(one.hit_rate)),
        ("sessions", f"{count(one.sessions)}, {count(one.session_blocks)} blocks"),
    ]
    if one.host_blocks:
        rows.append(("host blocks free", f"{count(one.host_blocks_free)} of {count(one.host_blocks)}"))
    return _pairs("KV cache", rows)


def _classes(view: View) -> Section:
    header = ["class", "running", "waiting", "oldest wait", "longest wait", "started", "shed", "evicted", "in time"]
    rows = [
        [
            one.name,
            count(one.running),
            count(one.waiting),
            duration(one.oldest_wait_s),
            duration(one.longest_wait_s),
            per_second(one.started_rate),
            count(one.shed),
            count(one.evicted),
            percent(one.in_time),
        ]
        for one in view.classes
    ]
    return Section("classes", TextTable(header, rows, num_labels=1))


def _tenants(view: View) -> Section:
    header = ["tenant", "requests", "refused", "mean queue", "tokens in", "tokens out", "out in all"]
    rows = [
        [
            printable(one.name) or NOTHING,
            per_second(one.requests_rate),
            per_second(one.rejected_rate),
            duration(one.mean_queue_s),
            per_second(one.prompt_tokens_rate),
            per_second(one.output_tokens_rate),
            count(one.output_tokens),
        ]
        for one in view.tenants[:MAX_TENANTS]
    ]
    more = len(view.tenants) - len(rows)
    return Section(f"tenants, {more} more not shown" if more else "tenants", TextTable(header, rows, num_labels=1))


def _errors(view: View) -> Section:
    header = ["error", "refused", "now", "failed", "now", "at the gateway"]
    rows = [
        [
            printable(one.tag),
            count(one.refused),
            per_second(one.refused_rate),
            count(one.failed),
            per_second(one.failed_rate),
            count(one.gateway),
        ]
        for one in view.errors
    ]
    if view.gateway is None:
        header, rows = header[:-1], [row[:-1] for row in rows]
    return Section("errors since the start (docs/errors.md)", TextTable(header, rows, num_labels=1))
