from collections.abc import Callable, Mapping, Sequence

import msgspec

from tidewheel.bench.tables import NOTHING, TextTable, number
from tidewheel.errors import Busy
from tidewheel.request import Priority
from tidewheel.top.server_view import ErrorLine, RequestLine, ServerView, count, duration, name, percent, rate, texts

MAX_BUSIEST = 8  # tenants and adapters that are shown
MAX_PLAIN_REQUESTS = 20  # of --once
_INDENT = "  "
OVERLOAD_TAGS = frozenset({"TW-BUSY", "TW-KV-FULL", "TW-DEADLINE"})
GONE_TAG = "TW-CANCELLED"  # of clients that hung up
FULL_CACHE = 0.95
LEAST_RATE = 1e-6  # of a difference of rates
GOOD_SHARE = 0.9  # of answers in time
NUM_STEPS = 2  # that a request waits without a queue: those in flight, then its own


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
# Panels: a label, and fields of a line as text.
_TRAFFIC = {
    "running / waiting": "{running} / {waiting}",
    "received / finished": "{received_rate} / {finished_rate}",
    "refused / failed": "{refused_rate} / {failed_rate}",
    "tokens in / out": "{prompt_tokens_rate} / {output_tokens_rate}",
    "first token p50/p95": "{first_token_p50_s} / {first_token_p95_s}",
    "next token p50/p95": "{inter_token_p50_s} / {inter_token_p95_s}",
    "queue p95": "{queue_p95_s}",
    "answers in time": "{in_time}",
}
_GATEWAY = {"gateway open": "{open_requests}, {requests_rate}"}
_STEPS = {
    "busy": "{busy}",
    "time of a step": "{seconds_per_step}",
    "steps": "{rate}",
    "tokens computed": "{tokens_rate}",
    "tokens a step": "{tokens_per_step} of {token_budget}",
    "rows at most": "{max_num_seqs}",
    "preemptions": "{preemptions}, {preemptions_rate}",
    "breaker": "{breaker}",
    "drafts accepted": "{accepted_drafts}, {accepted_per_step} a step",
    "restarts": "{restarts}",
}
_CACHE = {
    "in use": "{use}",
    "blocks": "{num_blocks}",
    "reusable blocks": "{cached_blocks}",
    "tokens found": "{hit_rate}",
    "sessions": "{sessions}, {session_blocks} blocks",
    "host blocks": "{host_blocks}, {host_blocks_free} free",
}
_OPTIONAL = ("drafts accepted", "restarts", "host blocks")  # not shown while there are none
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


def panels(view: ServerView) -> dict[str, TextTable]:
    traffic, steps, cache = _panel(view.traffic, _TRAFFIC), _panel(view.steps, _STEPS), _panel(view.cache, _CACHE)
    if view.gateway is not None:
        traffic += _panel(view.gateway, _GATEWAY)
    titled = {"traffic": traffic, "steps": steps, "KV cache": cache}
    return {title: TextTable(["", ""], rows, num_labels=1) for title, rows in titled.items()}


def tables(view: ServerView) -> dict[str, TextTable]:
    errors = _ERRORS if view.gateway is not None else _ERRORS[:-1]
    return {
        "classes": _table(_CLASSES, view.classes),
        _busiest("tenants", view.tenants): _table(_TENANTS, view.tenants[:MAX_BUSIEST]),
        _busiest("adapters", view.loras): _table(_LORAS, view.loras[:MAX_BUSIEST]),
        "errors since the start (docs/errors.md)": _table(errors, view.errors),
        f"{len(view.ranks)} ranks": _table(_RANKS, view.ranks),
    }


def request_cells(request: RequestLine) -> list[str]:
    return [cell(request) for _, cell in REQUEST_COLUMNS]


def requests_title(view: ServerView, order: str) -> str:
    if view.requests_note and not view.requests:
        return f"requests: {view.requests_note}"
    note = f"; {view.requests_note}" if view.requests_note else ""
    return f"requests: {view.num_sequences} unfinished, {order}{note}"


def ordered(view: ServerView, order: str) -> list[RequestLine]:
    return sorted(view.requests, key=ORDERS[order])


def as_text(view: ServerView) -> str:
    lines = [headline(view), view.summary, ""]
    for title, table in (panels(view) | tables(view)).items():
        if table.rows:
            lines += [title, *_lines(table), ""]
    order = next(iter(ORDERS))
    rows = [request_cells(one) for one in ordered(view, order)[:MAX_PLAIN_REQUESTS]]
    lines.append(requests_title(view, order))
    if rows:
        lines += _lines(TextTable([name for name, _ in REQUEST_COLUMNS], rows))
    return "\n".join(lines)


def _lines(table: TextTable) -> list[str]:
    text = table.as_text().split("\n")
    return [f"{_INDENT}{line}" for line in (text if any(table.header) else text[1:])]


def _panel(line: msgspec.Struct, templates: Mapping[str, str]) -> list[list[str]]:
    values = texts(line)
    rows = [[label, template.format(**values)] for label, template in templates.items()]
    return [row for row in rows if row[0] not in _OPTIONAL or not row[1].startswith((NOTHING, "0, "))]


def _busiest(what: str, lines: Sequence[msgspec.Struct]) -> str:
    more = len(lines) - MAX_BUSIEST
    return f"{what}, {more} more not shown" if more > 0 else what


def _table(header: Sequence[str], lines: Sequence[msgspec.Struct]) -> TextTable:
    return TextTable(list(header), [list(texts(line).values())[: len(header)] for line in lines], num_labels=1)


def verdict(view: ServerView) -> str:
    """Return the first sentence of docs/top.md that describes the server's state."""
    if view.is_ready is False:
        return f"NOT READY: {view.reason or view.state}"
    if view.gateway_problem:
        return f"GATEWAY: {view.gateway_problem}"
    failing = [f"{one.tag} {rate(one.failed_rate)}" for one in view.errors if one.tag != GONE_TAG and one.failed_rate]
    if failing:
        return f"FAILING: {', '.join(failing)}"
    limited = view.traffic.rate_limited_rate or 0.0
    refused = [f"{one.tag} {rate(one.refused_rate)}" for one in view.errors if _is_overload(one, limited)]
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
    by_rates = limited if line.tag == Busy.tag else 0.0
    return line.tag in OVERLOAD_TAGS and (line.refused_rate or 0.0) - by_rates > LEAST_RATE


def _limited_tenants(view: ServerView) -> str:
    tenants = [one for one in view.tenants if one.rejected_rate]
    return ", ".join(f"{one.name or 'no tenant'} has {number(one.rejected_rate)}/s refused" for one in tenants)


def _unhindered(view: ServerView) -> str:
    in_time = view.traffic.in_time
    if in_time is not None and in_time < GOOD_SHARE:
        return f"SLOW: {percent(in_time)} of the answers are in time, and no queue makes them late; {_pace(view)}"
    return f"SERVING: no queue; {_pace(view)}" if view.traffic.running else "IDLE: nothing runs"


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
