from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from tidewheel.bench.tables import NOTHING, TextTable, number
from tidewheel.errors import Busy
from tidewheel.request import Priority
from tidewheel.top.figure_text import count, duration, name, per_second, percent
from tidewheel.top.server_view import ErrorLine, RequestLine, ServerView, cells

MAX_BUSIEST = 8  # tenants and adapters that are shown
MAX_PLAIN_REQUESTS = 20  # of --once
_INDENT = "  "
_FULL, _EMPTY = "█", "░"
OVERLOAD_TAGS = frozenset({"TW-BUSY", "TW-KV-FULL", "TW-DEADLINE"})
GONE_TAG = "TW-CANCELLED"  # of clients that hung up
FULL_CACHE = 0.95
LEAST_RATE = 1e-6  # of a difference of rates
GOOD_SHARE = 0.9  # of answers in time
NUM_STEPS = 2  # that a request waits without a queue: those in flight, then its own


class TextSection(NamedTuple):
    title: str
    table: TextTable


ORDERS: dict[str, Callable[[RequestLine], tuple[float | str, ...]]] = {
    "slowest first": lambda one: (-one.age_s,),
    "fewest tokens/s first": lambda one: (one.tokens_rate or 0.0, -one.age_s),
    "most tokens first": lambda one: (-(one.num_prompt_tokens + one.num_output_tokens),),
    "longest wait first": lambda one: (-one.waited_s,),
    "by tenant": lambda one: (one.tenant, -one.age_s),
    "by class": lambda one: (Priority[one.priority.upper()], -one.age_s),
}
REQUEST_COLUMNS: Sequence[tuple[str, Callable[[RequestLine], str]]] = (  # header and cell
    ("class", lambda one: one.priority),
    ("state", lambda one: one.state),
    ("age", lambda one: duration(one.age_s)),
    ("waited", lambda one: duration(one.waited_s)),
    ("first token", lambda one: duration(one.first_token_s)),
    ("tokens/s", lambda one: number(one.tokens_rate)),
    ("out", lambda one: count(one.num_output_tokens)),
    ("of", lambda one: count(one.max_tokens)),
    ("in", lambda one: count(one.num_prompt_tokens)),
    ("cached", lambda one: count(one.num_cached_tokens)),
    ("preempted", lambda one: count(one.num_preemptions)),
    ("tenant", lambda one: name(one.tenant)),
    ("id", lambda one: name(one.request_id)),
)
NUM_TEXTS = 2  # columns at the end, whose cells clients choose
_CLASSES = (
    "class", "running", "waiting", "oldest wait", "longest wait", "started", "shed", "evicted", "in time",
    "objectives",
)  # fmt: skip
_TENANTS = ("tenant", "requests", "refused", "mean queue", "tokens in", "tokens out", "out in all", "objectives")
_LORAS = ("adapter", "running", "waiting", "requests", "tokens in", "tokens out", "out in all")
_ERRORS = ("error", "refused", "now", "failed", "now", "at the gateway")
_RANKS = ("model", "rank", "device", "host memory", "CPU", "process")


def headline(view: ServerView) -> str:
    state = {True: "ready", False: "NOT READY", None: "readiness unknown"}[view.is_ready]
    return f"tidewheel top   {view.server}   {', '.join(view.models)}   {state}"


def panels(view: ServerView) -> list[TextSection]:
    return [_traffic(view), _steps(view), _cache(view)]


def tables(view: ServerView) -> list[TextSection]:
    errors = _ERRORS if view.gateway is not None else _ERRORS[:-1]
    return [
        _table("classes", _CLASSES, view.classes),
        _busiest("tenants", _TENANTS, view.tenants),
        _busiest("adapters", _LORAS, view.loras),
        _table("errors since the start (docs/errors.md)", errors, view.errors),
        _table(f"{len(view.ranks)} ranks", _RANKS, view.ranks),
    ]


def request_cells(request: RequestLine) -> list[str]:
    return [cell(request) for _, cell in REQUEST_COLUMNS]


def requests_title(view: ServerView, order: str) -> str:
    if view.requests_note and not view.requests:
        return f"requests: {view.requests_note}"
    note = f"; {view.requests_note}" if view.requests_note else ""
    return f"requests: {view.num_sequences} unfinished, {order}{note}"


def ordered(view: ServerView, order: str, *, is_reversed: bool = False) -> list[RequestLine]:
    return sorted(view.requests, key=ORDERS[order], reverse=is_reversed)


def as_text(view: ServerView) -> str:
    lines = [headline(view), view.summary, ""]
    for section in (*panels(view), *tables(view)):
        if section.table.rows:
            lines += [section.title, *_lines(section.table), ""]
    order = next(iter(ORDERS))
    rows = [request_cells(one) for one in ordered(view, order)[:MAX_PLAIN_REQUESTS]]
    lines.append(requests_title(view, order))
    if rows:
        lines += _lines(TextTable([name for name, _ in REQUEST_COLUMNS], rows))
    return "\n".join(lines)


def _lines(table: TextTable) -> list[str]:
    text = table.as_text().split("\n")
    return [f"{_INDENT}{line}" for line in (text if any(table.header) else text[1:])]


def _pairs(title: str, rows: Sequence[tuple[str, str]]) -> TextSection:
    return TextSection(title, TextTable(["", ""], [list(row) for row in rows], num_labels=1))


def _traffic(view: ServerView) -> TextSection:
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


def _steps(view: ServerView) -> TextSection:
    one = view.steps
    rows = [
        ("busy", bar(one.busy)),
        ("time of a step", duration(one.seconds_per_step)),
        ("steps", per_second(one.rate)),
        ("tokens computed", per_second(one.tokens_rate)),
        ("tokens a step", f"{number(one.tokens_per_step)} of {count(one.token_budget)}"),
        ("rows at most", count(one.max_num_seqs)),
        ("preemptions", f"{count(one.preemptions)}, {per_second(one.preemptions_rate)}"),
        ("breaker", name(one.breaker)),
    ]
    if one.accepted_drafts is not None:
        rows.append(("drafts accepted", f"{percent(one.accepted_drafts)}, {number(one.accepted_per_step)} a step"))
    if one.restarts is not None:
        rows.append(("restarts", count(one.restarts)))
    return _pairs("steps", rows)


def _cache(view: ServerView) -> TextSection:
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


def _busiest(what: str, header: Sequence[str], lines: Sequence[msgspec.Struct]) -> TextSection:
    more = len(lines) - MAX_BUSIEST
    return _table(f"{what}, {more} more not shown" if more > 0 else what, header, lines[:MAX_BUSIEST])


def _table(title: str, header: Sequence[str], lines: Sequence[msgspec.Struct]) -> TextSection:
    rows = [cells(line)[: len(header)] for line in lines]
    return TextSection(title, TextTable(list(header), rows, num_labels=1))


def verdict(view: ServerView) -> str:
    """Return the first sentence of docs/top.md that describes the server's state."""
    if view.is_ready is False:
        return f"NOT READY: {view.reason or view.state}"
    if view.gateway_problem:
        return f"GATEWAY: {view.gateway_problem}"
    failing = [
        f"{one.tag} {per_second(one.failed_rate)}" for one in view.errors if one.tag != GONE_TAG and one.failed_rate
    ]
    if failing:
        return f"FAILING: {', '.join(failing)}"
    limited = view.traffic.rate_limited_rate or 0.0
    refused = [f"{one.tag} {per_second(one.refused_rate)}" for one in view.errors if _is_overload(one, limited)]
    if refused:
        return f"OVERLOADED: refuses {', '.join(refused)}; {_queue(view)}"
    if _queues(view) and (view.cache.use or 0.0) >= FULL_CACHE:
        return f"KV CACHE FULL: {percent(view.cache.use)} in use; {_queue(view)}"
    if _queues(view):
        return f"QUEUEING: {_queue(view)}"
    if limited:
        return f"OVER ITS RATE: {_limited_tenants(view)}; the server has room: {_unhindered(view)}"
    return _unhindered(view)


def _is_overload(line: ErrorLine, limited: float) -> bool:
    rate = line.refused_rate or 0.0
    if line.tag == Busy.tag:
        rate -= limited
    return line.tag in OVERLOAD_TAGS and rate > LEAST_RATE


def _limited_tenants(view: ServerView) -> str:
    tenants = [one for one in view.tenants if one.rejected_rate]
    return ", ".join(f"{one.name or 'no tenant'} has {number(one.rejected_rate)}/s refused" for one in tenants)


def _unhindered(view: ServerView) -> str:
    in_time = view.traffic.in_time
    if in_time is not None and in_time < GOOD_SHARE:
        return f"SLOW: {percent(in_time)} of the answers are in time, and no queue makes them late; {_pace(view)}"
    if view.traffic.running:
        return f"SERVING: no queue; {_pace(view)}"
    return "IDLE: nothing runs"


def _queues(view: ServerView) -> bool:
    if not view.traffic.waiting:
        return False
    waits = [one.oldest_wait_s for one in view.classes if one.oldest_wait_s is not None]
    return not waits or max(waits) > NUM_STEPS * (view.steps.seconds_per_step or 0.0)


def _queue(view: ServerView) -> str:
    waits = [one.oldest_wait_s for one in view.classes if one.oldest_wait_s]
    since = f", the oldest for {duration(max(waits))}" if waits else ""
    return f"{view.traffic.waiting or 0:.0f} wait{since}, {view.traffic.running or 0:.0f} run; {_pace(view)}"


def _pace(view: ServerView) -> str:
    return f"a step takes {duration(view.steps.seconds_per_step)}"


def bar(share: float | None, width: int = 8) -> str:
    if share is None:
        return NOTHING
    full = round(min(max(share, 0.0), 1.0) * width)
    return f"{_FULL * full}{_EMPTY * (width - full)} {percent(share)}"
